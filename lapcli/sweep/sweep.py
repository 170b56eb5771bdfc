"""A sweep: its grids and its reports, from a file or from options, with every problem found before anything starts.

Also the choice of a `search:`, the values of the run with the best last validation.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lapcli.data.chat.formats import load_chat_recipe
from lapcli.evaluation.tasks import chosen_tasks
from lapcli.recipe import OBJECTIVES, RecipeError, recipe_to_dict
from lapcli.recipe.reading import Problem, in_reading_order, quoted
from lapcli.recipe.sweep import LoadedSweep
from lapcli.report.grouping import check_rows, row_keys
from lapcli.runtime.errors import LapError, UsageError
from lapcli.sweep.grid import Cell, Grid, GridSearch, Over, repeated
from lapcli.sweep.state import last_validation, progress

THEN = ("eval", "analyze", "sft")  # commands that may follow a run

MOST_CELLS = 2000

#: Parses the words after `lap` into the command's name and options; UsageError says why they would be refused.
Parse = Callable[[list[str]], tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Sweep:
    name: str
    grids: tuple[Grid, ...]
    reports: tuple[str, ...] = ()
    report_place: str = ""

    def check(self, parse: Parse | None = None) -> None:
        """Raise RecipeError with every problem of every possible cell, before anything is started.

        `parse` reads the commands of `then` and `report` as the command line would; without it only their names are
        checked.
        """
        self._check_size()
        problems: list[Problem] = []
        seen: dict[str, Cell] = {}
        for grid in self.grids:
            for make in (grid.search_cells, grid.cells):
                try:
                    cells = make()
                except RecipeError as error:
                    problems += [problem for problem in error.problems if problem not in problems]
                    continue
                problems += _check_then(grid, cells, parse)
                problems += _check_search(grid, cells)
                problems += _check_names(grid, cells, seen)
        for grid in self.grids:
            problems += _check_choices(grid, seen, problems)
        # Runs of chat stages have other recipes, which do not exist yet: the keys of a report's rows cannot be checked.
        has_stages = any(text.startswith("sft") for grid in self.grids for text in grid.then)
        problems += _check_reports(self.reports, [] if has_stages else list(seen.values()), self.report_place, parse)
        if problems:
            raise RecipeError(self.name, in_reading_order(problems, self.name))

    def _check_size(self) -> None:
        """Refuse a sweep that is too large, before any cell is built: three keys with a hundred values each would be a
        million recipes to check."""
        count = sum(grid.size for grid in self.grids)
        if count > MOST_CELLS:
            raise UsageError(
                f"{self.name} would be {count:,} runs, and a sweep has at most {MOST_CELLS:,}; give fewer values, or "
                "split it into several sweeps, each with a part of the values"
            )


def _check_names(grid: Grid, cells: Sequence[Cell], seen: dict[str, Cell]) -> list[Problem]:
    """Find cells of one name with different recipes; add the new ones to `seen`."""
    problems = []
    for cell in cells:
        other = seen.setdefault(cell.name, cell)
        if other is not cell and other.loaded != cell.loaded:
            message = f"two cells would both be the run {cell.name}; keep one, or give it another `name`"
            problems.append(Problem(grid.place("name"), "name", message))
    return problems


def _check_choices(grid: Grid, seen: Mapping[str, Cell], known: Sequence[Problem]) -> list[Problem]:
    """Find problems of the cells that a choice of the search leads to, beyond the known ones."""
    choices_by_problem: dict[Problem, list[Mapping[str, Any]]] = {}
    for choice, cells in grid.possible_cells():
        # A copy of `seen`: only one of the choices will be made, so that their cells do not clash with each other.
        wrong = cells.problems if isinstance(cells, RecipeError) else _check_names(grid, cells, dict(seen))
        for problem in wrong:
            if problem not in known:
                choices_by_problem.setdefault(problem, []).append(choice)
    problems = []
    for problem, choices in choices_by_problem.items():
        words = " ".join(f"{key}={value}" for key, value in choices[0].items())
        others = len(choices) - 1
        more = f" or {others} other{'s' if others > 1 else ''}" if others else ""
        problems.append(replace(problem, message=f"{problem.message}, if the search chooses {words}{more}"))
    return problems


def _check_search(grid: Grid, cells: Sequence[Cell]) -> list[Problem]:
    """Check that the number which decides the search is one that the runs will have."""
    if grid.search is None or not cells or not cells[0].is_search:
        return []
    known = OBJECTIVES[cells[0].loaded.objective].metrics
    if grid.search.by in known or grid.search.by.startswith("smoothing"):
        return []
    message = f"{quoted(grid.search.by)} is not a validation metric of this recipe; use one of {', '.join(known)}"
    return [Problem(grid.place("search", "by"), "search.by", message)]


def sweep_from_options(
    recipe: Path, over: Over, then: Sequence[str], options: Sequence[str], name: str | None = None
) -> Sweep:
    """Build the sweep of a command line."""
    if not over:
        raise UsageError(f"give --over, such as --over seed=0,1,2; a single run is trained by `lap train {recipe}`")
    for key, values in over.items():
        if (twice := repeated(key, values)) is not None:
            raise UsageError(f"--over {key} has {quoted(twice)} twice; keep one")
    _not_set_too(over, options)
    place = lambda *keys: "--then" if keys[0] == "then" else "--over"  # noqa: E731
    grid = Grid(recipe, over, name or recipe.stem, options=tuple(options), then=tuple(then), place=place)
    return Sweep(str(recipe), (grid,))


def sweep_from_file(loaded: LoadedSweep, options: Sequence[str], name: str | None = None, search: bool = True) -> Sweep:
    """Build the sweep of a file, with the command line's `--set` in every cell; without `search`, the recipe's values
    are used."""
    grids = []
    problems = []
    for number, group in enumerate(loaded.sweep.cells):
        recipe = loaded.path.parent / group.recipe
        for where, over in (("over", group.over), ("search", group.search.over if group.search else {})):
            _not_set_too(over, options)
            for key, values in over.items():
                if (twice := repeated(key, values)) is not None:
                    place = loaded.place("cells", number, *(("over",) if where == "over" else ("search", "over")), key)
                    problems.append(Problem(place, f"cells[{number}].{where}.{key}", f"has {quoted(twice)} twice"))
        spec = group.search
        grids.append(
            Grid(
                recipe=recipe,
                over=group.over,
                prefix=(f"{name}-" if name else "") + (group.name or recipe.stem),
                set=group.set,
                options=tuple(options),
                then=tuple(group.commands()),
                search=GridSearch(spec.over, spec.set, spec.keep, spec.by, spec.best) if spec and search else None,
                folder=loaded.path.parent,
                # As a default: a closure would see the last number of the loop.
                place=lambda *keys, number=number: loaded.place("cells", number, *keys),
            )
        )
    if problems:
        raise RecipeError(str(loaded.path), problems)
    return Sweep(str(loaded.path), tuple(grids), tuple(loaded.sweep.reports()), loaded.place("report"))


def _not_set_too(over: Over, options: Sequence[str]) -> None:
    for text in options:
        if (key := text.partition("=")[0].strip()) in over:
            raise UsageError(f"{key} is varied by the sweep and also given by --set; remove one of them")


def _check_then(grid: Grid, cells: Sequence[Cell], parse: Parse | None) -> list[Problem]:
    """Find commands that do not exist, unknown options, and tasks that do not fit the runs."""
    problems = []
    for number, text in enumerate(grid.then):
        sample = next((cell.then[number] for cell in cells if cell.then), None)
        if sample is None:
            continue
        objective = next(cell.loaded.objective for cell in cells if cell.then)
        named = objective if "{run}" not in text else None  # a chat stage of the run is of another kind
        try:
            name, options = _parsed(sample, THEN, parse)
            if name == "eval" and named and options.get("tasks"):
                chosen_tasks(named, options["tasks"])
            if name == "sft":
                recipe, set_ = options["recipe"], list(options["set_"] or [])
                load_chat_recipe(recipe, set_, options["data"], options["seed"])
        except LapError as error:
            problems.append(Problem(grid.place("then", number), "then", f"{error}, in {text[:100]!r}"))
    return problems


def _check_reports(texts: Sequence[str], cells: Sequence[Cell], place: str, parse: Parse | None) -> list[Problem]:
    """Check the options of the reports that end a sweep."""
    problems = []
    for text in texts:
        try:
            _, options = _parsed(f"report {text}", ("report",), parse)
            if options:
                values = (options[option] for option in ("paper", "format_", "rows", "columns", "baseline"))
                check_rows(row_keys(*values), [recipe_to_dict(cell.loaded) for cell in cells])
        except LapError as error:
            problems.append(Problem(place, "report", f"{error}, in {text[:100]!r}"))
    return problems


def _parsed(text: str, allowed: Sequence[str], parse: Parse | None) -> tuple[str, Mapping[str, Any]]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"quotes do not match ({error})") from None
    if not words or words[0] not in allowed:
        raise UsageError(f"expected a command among {', '.join(allowed)}")
    # --runs-dir is added by the runner; --help would end the command with success before it has done anything.
    if "--help" in words or "-h" in words or "--runs-dir" in words:
        raise UsageError("--help and --runs-dir have no effect here; leave them out")
    return ("", {}) if parse is None else parse(words)


@dataclass(frozen=True)
class SearchWinner:
    values: Mapping[str, Any]
    cell: str
    score: float
    by: str
    compared: int
    diverged: int
    runner_up: float | None

    def __str__(self) -> str:
        values = " ".join(f"{key}={value}" for key, value in self.values.items())
        text = f"{values}: {self.by} {self.score:.4f}, the best of {self.compared} ({self.cell})"
        if self.runner_up is not None:
            text += f"; next {self.runner_up:.4f}"
        return text + (f"; {self.diverged} diverged" if self.diverged else "")


def is_tried(cell: Cell, runs_dir: Path) -> bool:
    """Return whether the cell is trained or has diverged: a learning rate whose loss diverges is not the best one."""
    training = progress(cell, runs_dir)
    return training.is_trained or training.diverged


def choose(cells: Sequence[Cell], search: GridSearch, runs_dir: Path) -> SearchWinner | None:
    """Return the best cell's values, the first of equals; None while cells are left to try."""
    scores: list[tuple[float, Cell]] = []
    for cell in cells:
        if not progress(cell, runs_dir).is_trained:
            continue
        numbers = last_validation(cell, runs_dir)
        if search.by not in numbers:
            raise LapError(
                f"the last validation of {cell.name} has no {search.by}; "
                + (f"set `by` to {' or '.join(numbers)}" if numbers else "the run was not validated")
            )
        if math.isfinite(numbers[search.by]):
            scores.append((float(numbers[search.by]), cell))
    if not all(is_tried(cell, runs_dir) for cell in cells):
        return None
    if not scores:
        raise LapError(f"all {len(cells)} runs of the search diverged; add lower learning rates to it")
    # `sorted` is stable, with `reverse` too: of equal scores the first cell wins, on every machine.
    ordered = sorted(scores, key=lambda scored: scored[0], reverse=search.best == "highest")
    score, best = ordered[0]
    return SearchWinner(
        values=best.values,
        cell=best.name,
        score=score,
        by=search.by,
        compared=len(cells),
        diverged=len(cells) - len(scores),
        runner_up=ordered[1][0] if len(ordered) > 1 else None,
    )


def known_cells(sweep: Sweep, runs_dir: Path, only: str | None = None) -> list[tuple[Cell, bool]]:
    """Return every cell once, and whether it waits for a search; such cells have the recipe's own values."""
    cells: dict[str, tuple[Cell, bool]] = {}
    for grid in sweep.grids:
        searched = grid.search_cells()
        choice = choose(searched, grid.search, runs_dir) if grid.search else None
        waits = grid.search is not None and choice is None
        for cell in searched:
            cells.setdefault(cell.name, (cell, False))
        for cell in grid.cells(choice.values if choice else None):
            cells.setdefault(cell.name, (cell, waits))
    wanted = [known for name, known in cells.items() if only is None or fnmatchcase(name, only)]
    if not wanted:
        raise UsageError(f"no cell is called {only}; --dry-run lists the cells")
    return wanted


def startable_cells(sweep: Sweep, runs_dir: Path, only: str | None = None) -> list[Cell]:
    """Return the cells that can be started now, and those that a search may lead to and whose names are taken.

    The names are checked before the first start: after the search it would be too late.
    """
    cells = {cell.name: cell for cell, waits in known_cells(sweep, runs_dir, only) if not waits}
    taken = lambda name: (only is None or fnmatchcase(name, only)) and (runs_dir / name).exists()  # noqa: E731
    for grid in sweep.grids:
        if grid.search is not None and choose(grid.search_cells(), grid.search, runs_dir) is None:
            for choice in grid.choices():
                cells |= {cell.name: cell for cell in grid.cells(choice, taken)}
    return list(cells.values())
