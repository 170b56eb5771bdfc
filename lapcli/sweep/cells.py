"""The cells of a sweep: checked before anything starts, all problems at once.

A cell is an ordinary run, trained by `lap train` with its own name, and the commands that follow it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lapcli.kinds import KINDS
from lapcli.recipe import BaseRecipe, RecipeError, recipe_hash, recipe_loader, recipe_to_dict
from lapcli.recipe.reading import Problem, in_reading_order, quoted
from lapcli.recipe.sweep import LoadedSweep
from lapcli.runtime.errors import UsageError
from lapcli.sweep.grid import Over, cell_name, combinations, override, repeated
from lapcli.sweep.then import Parse, check_report, check_then, filled


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]  # in the form of `--set`
    values: Mapping[str, Any]  # what makes it this cell
    loaded: BaseRecipe = field(repr=False)
    then: tuple[str, ...] = ()
    is_search: bool = False

    @cached_property
    def recipe_sha256(self) -> str:
        return recipe_hash(self.loaded)

    def arguments(self, runs_dir: Path) -> list[str]:
        """Of `lap train`."""
        sets = [word for text in self.overrides for word in ("--set", text)]
        return ["train", str(self.recipe), *sets, "--name", self.name, "--runs-dir", str(runs_dir)]


@dataclass(frozen=True)
class SearchSpec:
    over: Over
    set: Mapping[str, Any]
    keep: Mapping[str, Any]
    by: str
    best: str


@dataclass(frozen=True)
class Grid:
    """One recipe and what is varied of it."""

    recipe: Path
    over: Over
    prefix: str
    set: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # `--set` of the command line: above the file's, in every cell
    then: tuple[str, ...] = ()
    search: SearchSpec | None = None
    folder: Path = Path()
    place: Callable[..., str] = lambda *keys: "--over"  # where a key stands: ("over", key), ("then", 0)

    def cells(
        self, chosen: Mapping[str, Any] | None = None, only: Callable[[str], bool] = lambda name: True
    ) -> list[Cell]:
        """The grid, with what a search chose; values that are the recipe's own anyway do not change the names.

        `only` picks cells by their names.
        """
        values = {**self._kept(), **(chosen or {})}
        places = {key: self.place("set", key) for key in self.set} | {
            **{key: self.place("search", "keep", key) for key in self._kept()},
            **{key: self.place("search", "over", key) for key in chosen or {}},
            **{key: self.place("over", key) for key in self.over},
        }
        return _load(self, self.prefix, self.over, {**self.set, **values}, _changes(self, values), places, only=only)

    def search_cells(self) -> list[Cell]:
        search = self.search
        if search is None:
            return []
        places = {key: self.place("set", key) for key in self.set}
        for name, keys in (("keep", search.keep), ("set", search.set), ("over", search.over)):
            places |= {key: self.place("search", name, key) for key in keys}
        set_ = {**self.set, **self._kept(), **search.set}
        return _load(self, f"{self.prefix}-search", search.over, set_, {}, places, is_search=True)

    def choices(self) -> list[dict[str, Any]]:
        """Every choice that the search can make; none without a search."""
        return [] if self.search is None else combinations(self.search.over)

    def possible_cells(self) -> Iterator[tuple[dict[str, Any], list[Cell] | RecipeError]]:
        """Every choice of the search with the cells that it leads to, or with what is wrong with them.

        Of the seeds only the first is there: no other key of a recipe depends on it.
        """
        fewer = replace(self, over={key: v[:1] if key == "seed" else v for key, v in self.over.items()})
        for choice in self.choices():
            try:
                yield choice, fewer.cells(choice)
            except RecipeError as error:
                yield choice, error

    def _kept(self) -> dict[str, Any]:
        """What the grid keeps of its search; `--set` comes before it."""
        given = {text.partition("=")[0].strip() for text in self.options}
        return {key: value for key, value in (self.search.keep if self.search else {}).items() if key not in given}

    @cached_property
    def load(self) -> Callable[[Sequence[str], int | None], Any]:
        return recipe_loader(self.recipe)


@dataclass(frozen=True)
class Sweep:
    name: str
    grids: tuple[Grid, ...]
    reports: tuple[str, ...] = ()
    report_place: str = ""

    def check(self, parse: Parse | None = None) -> None:
        """Raises RecipeError with every problem of every cell that can come; nothing was started.

        `parse` reads the commands of `then` and `report` as the command line would; without it only their names are
        checked.
        """
        problems: list[Problem] = []
        seen: dict[str, Cell] = {}
        source = self.name
        for grid in self.grids:
            for make in (grid.search_cells, grid.cells):
                try:
                    cells = make()
                except RecipeError as error:
                    problems += [problem for problem in error.problems if problem not in problems]
                    continue
                problems += check_then(grid.then, cells, grid.place, parse)
                problems += _check_search(grid, cells)
                problems += _check_names(grid, cells, seen)
        for grid in self.grids:
            problems += _check_choices(grid, seen, problems)
        has_stages = any(text.startswith("sft") for grid in self.grids for text in grid.then)
        problems += check_report(self.reports, [] if has_stages else list(seen.values()), self.report_place, parse)
        if problems:
            raise RecipeError(source, in_reading_order(problems, source))


def _check_names(grid: Grid, cells: Sequence[Cell], seen: dict[str, Cell]) -> list[Problem]:
    """Two cells of one name are one cell, or a mistake; `seen` gets the new ones."""
    problems = []
    for cell in cells:
        other = seen.setdefault(cell.name, cell)
        if other is not cell and other.loaded != cell.loaded:
            message = f"two cells would both be the run {cell.name}; keep one, or give it another `name`"
            problems.append(Problem(grid.place("name"), "name", message))
    return problems


def _check_choices(grid: Grid, seen: Mapping[str, Cell], known: Sequence[Problem]) -> list[Problem]:
    """What is wrong with the cells that a choice of the search leads to, beside what is known already."""
    found: dict[Problem, list[Mapping[str, Any]]] = {}
    for choice, cells in grid.possible_cells():
        wrong = cells.problems if isinstance(cells, RecipeError) else _check_names(grid, cells, dict(seen))
        for problem in wrong:
            if problem not in known:
                found.setdefault(problem, []).append(choice)
    problems = []
    for problem, choices in found.items():
        words = " ".join(f"{key}={value}" for key, value in choices[0].items())
        others = len(choices) - 1
        more = f" or {others} other{'s' if others > 1 else ''}" if others else ""
        problems.append(replace(problem, message=f"{problem.message}, if the search chooses {words}{more}"))
    return problems


def _check_search(grid: Grid, cells: Sequence[Cell]) -> list[Problem]:
    """Whether the number that decides is one that the runs will have."""
    if grid.search is None or not cells or not cells[0].is_search:
        return []
    known = KINDS[cells[0].loaded.objective].metrics
    if grid.search.by in known or grid.search.by.startswith("smoothing"):
        return []
    message = f"no validation tells {quoted(grid.search.by)}; there are {', '.join(known)}"
    return [Problem(grid.place("search", "by"), "search.by", message)]


def sweep_from_options(
    recipe: Path, over: Over, then: Sequence[str], options: Sequence[str], name: str | None = None
) -> Sweep:
    """The sweep that a command line says."""
    if not over:
        raise UsageError(f"what to vary? Give --over, such as --over seed=0,1,2; one run: lap train {recipe}")
    for key, values in over.items():
        if (twice := repeated(values)) is not None:
            raise UsageError(f"--over {key} has {quoted(twice)} twice; keep one")
    _not_set_too(over, options)
    place = lambda *keys: "--then" if keys[0] == "then" else "--over"  # noqa: E731
    grid = Grid(recipe, over, name or recipe.stem, options=tuple(options), then=tuple(then), place=place)
    return Sweep(str(recipe), (grid,))


def sweep_from_file(loaded: LoadedSweep, options: Sequence[str], name: str | None = None, search: bool = True) -> Sweep:
    """The sweep of a file, with the command line's `--set` in every cell; `search` false leaves the recipe's values."""
    grids = []
    problems = []
    for number, group in enumerate(loaded.sweep.cells):
        recipe = loaded.path.parent / group.recipe
        for where, over in (("over", group.over), ("search", group.search.over if group.search else {})):
            _not_set_too(over, options)
            for key, values in over.items():
                if (twice := repeated(values)) is not None:
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
                search=SearchSpec(spec.over, spec.set, spec.keep, spec.by, spec.best) if spec and search else None,
                folder=loaded.path.parent,
                place=lambda *keys, number=number: loaded.place("cells", number, *keys),
            )
        )
    if problems:
        raise RecipeError(str(loaded.path), problems)
    return Sweep(str(loaded.path), tuple(grids), tuple(loaded.sweep.reports()), loaded.place("report"))


def _not_set_too(over: Over, options: Sequence[str]) -> None:
    for text in options:
        if (key := text.partition("=")[0].strip()) in over:
            raise UsageError(f"{key} is varied by the sweep and given by --set too; leave one out")


def _changes(grid: Grid, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What of a choice differs from the grid's own recipe, and so belongs into the names."""
    if not chosen:
        return {}
    own = grid.load([*(override(k, v) for k, v in grid.set.items()), *grid.options], None)
    values = recipe_to_dict(own)
    return {key: value for key, value in chosen.items() if _value(values, key) != value}


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _load(
    grid: Grid,
    prefix: str,
    over: Over,
    set_: Mapping[str, Any],
    named: Mapping[str, Any],
    places: Mapping[str, str],
    *,
    is_search: bool = False,
    only: Callable[[str], bool] = lambda name: True,
) -> list[Cell]:
    """`named`: what stands in the names beside the values of `over`; `places`: where each key was written."""
    cells = []
    problems: list[Problem] = []
    for values in combinations(over):
        name = cell_name(prefix, {**named, **values})
        if not only(name):
            continue
        overrides = (*(override(k, v) for k, v in set_.items()), *grid.options)
        overrides = (*overrides, *(override(key, value) for key, value in values.items()))
        try:
            recipe = grid.load(overrides, None)
        except RecipeError as error:
            found = [_at_its_place(problem, places) for problem in error.problems]
            problems += [problem for problem in found if problem not in problems]
            continue
        if not isinstance(recipe, BaseRecipe):
            message = "has stages, which follow a run: put it into `then`, as sft RECIPE"
            raise RecipeError(str(grid.recipe), [Problem(str(grid.recipe), "stages", message)])
        then = () if is_search else tuple(filled(text, name, recipe.seed, grid.folder) for text in grid.then)
        cells.append(Cell(name, grid.recipe, overrides, values, recipe, then, is_search))
    if problems:
        raise RecipeError(str(grid.recipe), problems)
    return cells


def _at_its_place(problem: Problem, places: Mapping[str, str]) -> Problem:
    """A cell is told its values by `--set`; the writer wrote them elsewhere."""
    message = problem.message.replace("is from --set", "is from the grid")
    if problem.where != "--set":
        return Problem(problem.where, problem.key, message)
    for key, place in places.items():
        if f"{problem.key}.".startswith((f"{key}.", f"{key}[")) or key.startswith(f"{problem.key}."):
            return Problem(place, problem.key, message)
    return Problem(problem.where, problem.key, message)
