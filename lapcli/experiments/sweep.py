"""Sweeps: grids of recipes from a file or from options, every problem found before anything starts, and their cost.

    cells:
      - recipe: ../vitb_cifar100.yaml         # beside this file
        tune:                                 # runs first; the best of these is used in every cell of `over`
          over: {optimizer.lr: [3e-4, 5e-4]}
          set: {data.validation: 0.1}         # only while tuning
          keep: {schedule.start_lr: 3e-6}     # while tuning and in the grid that follows
          by: validation_top1
        over: {model.laplacian_heads: [0, 6, 12], seed: [0, 1, 2]}
        then: eval --tasks top1
    report: --rows model.laplacian_heads

A sweep file is checked as strictly as a recipe, and errors name file and line.
"""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lapcli.experiments.cells import (
    Cell,
    Over,
    cell_name,
    combinations,
    commands_left,
    last_scores,
    overrides_of,
    progress,
    value_at,
)
from lapcli.experiments.runner import Chooser
from lapcli.planning import TrainingPlan, plan_training
from lapcli.recipe import BaseRecipe, RecipeError, recipe_loader, recipe_to_dict
from lapcli.recipe.loading import check_recipe, find_recipe, misspelt, read_with_parents
from lapcli.recipe.reading import Problem, Unreadable, in_reading_order, quoted
from lapcli.recipe.section import Section, Text, combination
from lapcli.runtime.devices import Device
from lapcli.runtime.errors import LapError, UsageError, known_names
from lapcli.training.train import disk_bytes

MOST_CELLS = 2000
Values = Annotated[list[Any], Field(min_length=1, max_length=1000)]


class Tune(Section):
    """Runs that choose the grid's values: those of the best run by a validation metric."""

    over: Annotated[dict[str, Values], Field(min_length=1)]
    set: dict[str, Any] = Field(default_factory=dict)  # only while tuning, such as images held out from training
    # During tuning and in the following grid, which would otherwise differ from the tuned recipe; without
    # tuning (`--no-tune`) the recipe's own values are kept.
    keep: dict[str, Any] = Field(default_factory=dict)
    by: Text  # a metric of the last validation, such as validation_top1


class Group(Section):
    """One recipe and the keys that vary; every combination of values is a cell."""

    recipe: Text  # path from the sweep file
    name: Text | None = None  # first part of the runs' names; null: the recipe's
    set: dict[str, Any] = Field(default_factory=dict)  # applied to every cell
    tune: Tune | None = None
    over: dict[str, Values] = Field(default_factory=dict)
    # Commands after training: eval, analyze or sft. {run}, {seed} and {folder} (of this file) are filled in; without
    # {run}, `--run` is added.
    then: Text | list[Text] = Field(default_factory=list, description="a command, such as eval --tasks top1, or a list")

    @combination("over", "set", "tune")
    def _given_once(self) -> str | None:
        sections = [self.over, self.set, *([self.tune.over, self.tune.keep] if self.tune else [])]
        keys = [key for section in sections for key in section]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        return f"{', '.join(twice)} is given twice, in over, set, tune.over or tune.keep; keep one" if twice else None


class SweepFile(Section):
    cells: Annotated[list[Group], Field(min_length=1, max_length=100)]
    report: Text | list[Text] = Field(  # options of `lap report`, which gets the runs of the cells
        default_factory=list, description="options of lap report, such as --format html, or a list of these"
    )


@dataclass(frozen=True)
class Grid:
    """A group of a sweep with its recipe."""

    recipe: Path
    group: Group
    prefix: str
    options: tuple[str, ...] = ()  # `--set` of the command line, in every cell; overrides the file's values
    folder: Path = Path()
    place: Callable[..., str] = lambda *keys: f"--{keys[0]}"  # where ("over", key) ... was written

    @property
    def then(self) -> list[str]:
        return [self.group.then] if isinstance(self.group.then, str) else self.group.then

    def tune_cells(self) -> list[Cell]:
        tune = self.group.tune
        return [] if tune is None else self._make(f"{self.prefix}-tune", tune.over, tune.set, {}, is_search=True)

    def cells(self, chosen: Mapping[str, Any] | None = None, over: Over | None = None) -> list[Cell]:
        """Build the cells; chosen and kept values that equal the recipe's do not change the names."""
        values = {**self._kept(), **(chosen or {})}
        own = recipe_to_dict(self._load((*overrides_of(self.group.set), *self.options))) if values else {}
        named = {key: value for key, value in values.items() if value_at(own, key) != value}
        return self._make(self.prefix, self.group.over if over is None else over, chosen or {}, named)

    def _kept(self) -> dict[str, Any]:
        """Return the values of `keep`, except those that `--set` overrides."""
        given = {text.partition("=")[0].strip() for text in self.options}
        kept = self.group.tune.keep if self.group.tune else {}
        return {key: value for key, value in kept.items() if key not in given}

    def _make(
        self, prefix: str, over: Over, extra: Mapping[str, Any], named: Mapping[str, Any], *, is_search: bool = False
    ) -> list[Cell]:
        """Build cells with `extra` values; `named`: values in the names beside those of `over`."""
        cells = []
        problems: list[Problem] = []
        for values in combinations(over):
            name = cell_name(prefix, {**named, **values})
            # Later values win: the command line over the file, and the cell's own values over both.
            common = overrides_of({**self.group.set, **self._kept(), **extra})
            overrides = (*common, *self.options, *overrides_of(values))
            try:
                recipe = self._load(overrides)
            except RecipeError as error:
                placed = [replace(each, where=self._where(each)) for each in error.problems]
                problems += [problem for problem in placed if problem not in problems]
                continue
            then = () if is_search else tuple(fill_command(text, name, recipe.seed, self.folder) for text in self.then)
            cells.append(Cell(name, self.recipe, overrides, values, recipe, then, is_search))
        if problems:
            raise RecipeError(str(self.recipe), problems)
        return cells

    def _where(self, problem: Problem) -> str:
        """Return where the value of a problem was written; the cell itself received it by `--set`."""
        tune = {} if self.group.tune is None else dict(self.group.tune)
        for section in (("over",), ("set",), ("tune", "over"), ("tune", "set"), ("tune", "keep")):
            for key in tune.get(section[1], {}) if len(section) > 1 else getattr(self.group, section[0]):
                # With the dot, so that only complete parts of a key match.
                is_part = f"{problem.key}.".startswith((f"{key}.", f"{key}[")) or key.startswith(f"{problem.key}.")
                if is_part and problem.where == "--set":
                    return self.place(*section, key)
        return problem.where

    def _load(self, overrides: tuple[str, ...]) -> BaseRecipe:
        """Load the recipe of a cell, once: checks, costs and the runner all build the same cells."""
        if overrides not in self._loaded:
            self._loaded[overrides] = self._loader(overrides, None)
        recipe = self._loaded[overrides]
        if not isinstance(recipe, BaseRecipe):
            message = "has stages, which start from a run; list it under `then`, as sft RECIPE"
            raise RecipeError(str(self.recipe), [Problem(str(self.recipe), "stages", message)])
        return recipe

    @cached_property
    def _loader(self) -> Callable[[Sequence[str], int | None], Any]:
        return recipe_loader(self.recipe)

    @cached_property
    def _loaded(self) -> dict[tuple[str, ...], Any]:
        return {}


def fill_command(text: str, run: str, seed: int, folder: Path) -> str:
    """Fill in a command of `then` for one run; without {run}, `--run` is added."""
    named = "{run}" in text
    for mark, value in {"{run}": run, "{seed}": str(seed), "{folder}": str(folder)}.items():
        text = text.replace(mark, shlex.quote(value))
    return text if named else f"{text} --run {shlex.quote(run)}"


@dataclass(frozen=True)
class Sweep:
    name: str
    grids: tuple[Grid, ...]
    reports: tuple[str, ...] = ()
    report_place: str = ""

    def check(self) -> None:
        """Raise RecipeError with every problem of every cell, before anything is started."""
        # The size is checked first: three keys with a hundred values each would be a million recipes.
        overs = [each.over for grid in self.grids for each in (grid.group, grid.group.tune) if each is not None]
        if (count := sum(math.prod(map(len, over.values())) for over in overs)) > MOST_CELLS:
            raise UsageError(
                f"{self.name} would be {count:,} runs, and a sweep has at most {MOST_CELLS:,}; give fewer values, or "
                "split it into several sweeps, each with a part of the values"
            )
        problems: list[Problem] = []
        seen: dict[str, Cell] = {}
        for grid in self.grids:
            for make in (grid.tune_cells, grid.cells):
                problems += [problem for problem in _check(grid, make, seen) if problem not in problems]
        if problems:
            raise RecipeError(self.name, in_reading_order(problems, self.name))


def _check(grid: Grid, make: Callable[[], list[Cell]], seen: dict[str, Cell]) -> list[Problem]:
    """Return the cells' problems and add new ones to `seen`."""
    try:
        cells = make()
    except RecipeError as error:
        return error.problems
    problems = []
    for cell in cells:
        if seen.setdefault(cell.name, cell).loaded != cell.loaded:
            message = f"two cells would both be the run {cell.name}; keep one, or give it another `name`"
            problems.append(Problem(grid.place("name"), "name", message))
    known = cells[0].loaded.metrics if cells else {}
    if grid.group.tune and cells and grid.group.tune.by not in known:
        by = grid.group.tune.by
        message = f"{quoted(by)} is not a validation metric{known_names(by, known)}"
        problems.append(Problem(grid.place("tune", "by"), "tune.by", message))
    return problems


def load_sweep(
    path: Path, options: Sequence[str] = (), name: str | None = None, *, over: Over, then: Sequence[str], tune: bool
) -> Sweep:
    """Load a sweep file, or build one from a recipe with `over` and `then`; `options` apply to every cell.

    Without `tune`, the recipe's values are used. RecipeError lists every problem at once.
    """
    path = find_recipe(path)
    try:
        document, problems = read_with_parents(path)
    except Unreadable as error:
        raise RecipeError(str(path), [error.problem]) from None
    if "objective" in document.values or not any(
        key in SweepFile.model_fields or misspelt(key, SweepFile) for key in document.values
    ):
        if not over:
            raise UsageError(f"give --over, such as --over seed=0,1,2; a single run is trained by `lap train {path}`")
        if not tune:
            raise UsageError("--no-tune is for sweep files; leave it out")
        # Not validated: the values were checked by `parse_over`, and there may be more than a file can hold.
        group = Group.model_construct(recipe=str(path), over=over, then=list(then))
        return _without_set(Sweep(str(path), (Grid(path, group, name or path.stem, tuple(options)),)))
    if over or then:
        raise UsageError(f"{path} has its own grid; leave out --over and --then, or copy the file and change it")
    file, wrong = check_recipe(SweepFile, document)
    if file is None or problems or wrong:
        raise RecipeError(str(path), in_reading_order([*problems, *wrong], str(path)))
    grids = []
    for number, group in enumerate(file.cells):
        recipe = path.parent / group.recipe
        prefix = (f"{name}-" if name else "") + (group.name or recipe.stem)
        own = group if tune else group.model_copy(update={"tune": None})
        # As a default: a closure would use the last value of the loop.
        place = lambda *keys, number=number: document.place(("cells", number, *keys))  # noqa: E731
        grids.append(Grid(recipe, own, prefix, tuple(options), path.parent, place))
    reports = [file.report] if isinstance(file.report, str) else file.report
    return _without_set(Sweep(str(path), tuple(grids), tuple(reports), document.place(("report",))))


def _without_set(sweep: Sweep) -> Sweep:
    """Refuse keys that are varied and also given by `--set`."""
    for grid in sweep.grids:
        given = {text.partition("=")[0].strip() for text in grid.options}
        if both := given & {*grid.group.over, *(grid.group.tune.over if grid.group.tune else ())}:
            raise UsageError(f"{min(both)} is varied by the sweep and also given by --set; remove one of them")
    return sweep


def choose(cells: Sequence[Cell], by: str, runs_dir: Path) -> tuple[Cell, str] | None:
    """Return the best cell (the first among equals) and the reason; None while cells remain to be tried."""
    if not all(progress(cell, runs_dir).is_tried for cell in cells):
        return None
    scores = last_scores([cell.name for cell in cells if progress(cell, runs_dir).is_trained], runs_dir)
    for name, numbers in scores.items():
        if by not in numbers:
            raise LapError(
                f"the last validation of {name} has no {by}, by which its sweep is tuned; see validation.every"
            )
    finite = {name: numbers[by][0] for name, numbers in scores.items() if math.isfinite(numbers[by][0])}
    if not finite:
        raise LapError(f"all {len(cells)} runs that tune the sweep diverged; add lower learning rates")
    is_higher = next(iter(scores.values()))[by][1] == "higher"
    # max and min return the first among equals, on every machine.
    name = (max if is_higher else min)(finite, key=lambda name: finite[name])
    best = next(cell for cell in cells if cell.name == name)
    values = " ".join(f"{key}={value}" for key, value in best.values.items())
    diverged = f"; {len(cells) - len(finite)} diverged" if len(finite) < len(cells) else ""
    return best, f"{values}: {by} {finite[name]:.4f}, the best of {len(cells)} ({best.name}){diverged}"


class SweepChooser(Chooser):
    """All cells of a sweep; a grid with `tune` joins when its values are chosen."""

    def __init__(self, sweep: Sweep, runs_dir: Path, only: str | None, tell: Callable[[str], None]) -> None:
        super().__init__([], runs_dir)
        self.only, self.tell = only, tell
        self.undecided = [grid for grid in sweep.grids if grid.group.tune]
        self.chosen: dict[str, Mapping[str, Any]] = {}
        for grid in sweep.grids:
            self._add(grid.tune_cells() or grid.cells())
        self._decide()

    def settled(self, cell: Cell, state: str) -> str:
        if cell.is_search:
            self._decide()
        return ""

    def later(self) -> list[float]:
        return [1.0 for grid in self.undecided for cell in grid.cells() if self._is_wanted(cell)]

    def _is_wanted(self, cell: Cell) -> bool:
        return self.only is None or fnmatchcase(cell.name, self.only)

    def _add(self, cells: Sequence[Cell]) -> None:
        self._new += [cell for cell in cells if self._is_wanted(cell)]

    def _decide(self) -> None:
        for grid in list(self.undecided):
            assert grid.group.tune is not None
            # None also if a run failed: the grid waits until the same command has tried it again.
            if (choice := choose(grid.tune_cells(), grid.group.tune.by, self.runs_dir)) is not None:
                self.undecided.remove(grid)
                self.chosen[choice[0].name] = choice[0].values
                self.tell(f"chosen for {grid.prefix}: {choice[1]}")
                self._add(grid.cells(choice[0].values))


def known_cells(sweep: Sweep, runs_dir: Path, only: str | None = None) -> list[tuple[Cell, bool]]:
    """Return every cell once, and whether it waits for tuning; such cells have the recipe's own values."""
    cells: dict[str, tuple[Cell, bool]] = {}
    for grid in sweep.grids:
        tuning = grid.tune_cells()
        choice = choose(tuning, grid.group.tune.by, runs_dir) if grid.group.tune else None
        for cell in tuning:
            cells.setdefault(cell.name, (cell, False))
        for cell in grid.cells(choice[0].values if choice else None):
            cells.setdefault(cell.name, (cell, bool(tuning) and choice is None))
    wanted = [known for name, known in cells.items() if only is None or fnmatchcase(name, only)]
    if not wanted:
        raise UsageError(f"no cell is called {only}; --dry-run lists the cells")
    return wanted


def disk_left(known: Sequence[tuple[Cell, bool]], runs_dir: Path) -> int:
    """Return the maximum bytes of the checkpoints of cells that remain to be trained."""
    left = [cell for cell, _ in known if not progress(cell, runs_dir).is_trained]
    sizes = {shape: disk_bytes(cell.loaded) for shape, cell in {_shape(cell): cell for cell in left}.items()}
    return sum(sizes[_shape(cell)] for cell in left)


def _shape(cell: Cell) -> str:
    """Return the recipe without keys that affect neither cost nor size. Operators stay: some have parameters."""
    values = recipe_to_dict(cell.loaded)
    for key in ("seed", "optimizer", "laplacian_heads", "drop_path"):
        values.pop(key, None)
        values.get("model", {}).pop(key, None)
    return json.dumps(values, sort_keys=True)


def sweep_cost(known: Sequence[tuple[Cell, bool]], runs_dir: Path, device: Device | None = None) -> dict[str, Any]:
    """Plan every cell on one device, by default this machine's, and return the remaining work."""
    plans: dict[str, TrainingPlan] = {}
    cells: list[dict[str, Any]] = []
    for cell, waits in known:
        shape = _shape(cell)
        plan = plans[shape] = plans.get(shape) or plan_training(cell.loaded, 1, device)
        training = progress(cell, runs_dir)
        left = 0.0 if training.is_trained else 1 - training.step / plan.steps if plan.steps else 1.0
        state = "trained" if training.is_trained and commands_left(cell, runs_dir) else training.status
        cost = {"flops": plan.flops, "hours": plan.hours}
        rest = {f"{name}_left": None if value is None else value * left for name, value in cost.items()}
        cells.append({"cell": cell.name, "state": "waits" if waits else state, "steps": plan.steps, **cost, **rest})
    names = ("flops", "flops_left", "hours", "hours_left")
    columns = {name: [cell[name] for cell in cells] for name in names}
    totals = {name: None if None in values else sum(values) for name, values in columns.items()}
    share = "" if plan.mfu is None else f" at {plan.mfu:.0%} of the peak"
    return {"cells": cells, **totals, "devices": f"1 x {plan.device}{share}"}
