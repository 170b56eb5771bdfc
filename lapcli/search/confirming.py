"""Confirm the winner on fresh seeds: it counts as better only if the interval of the difference excludes zero.

The best of many trials at one seed is partly luck, and more so the more trials there are. Therefore the winner and the
best control are trained again with seeds that the search has not used, and compared seed by seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lapcli.recipe import recipe_to_dict
from lapcli.report.statistics import Paired, compare
from lapcli.search.space import plan_of
from lapcli.search.trials import CONTROL, SEARCH, SearchSpec, Trial, finished_value
from lapcli.sweep.grid import Cell, override

NAMES = {SEARCH: "winner", CONTROL: "control"}


@dataclass(frozen=True)
class Confirmation:
    winner: Trial
    control: Trial
    values: Mapping[str, Mapping[str, float]]  # arm to seed to metric
    paired: Paired | None
    higher_is_better: bool
    is_same: bool = False  # winner and control are the same recipe

    @property
    def is_better(self) -> bool:
        if self.paired is None or self.paired.interval is None:
            return False
        low, high = self.paired.interval
        return low > 0 if self.higher_is_better else high < 0

    def verdict(self, metric: str) -> str:
        if self.is_same:
            return "The winner is the control itself: no head plan in the space was better than a constant one."
        if self.paired is None:
            return "Not confirmed: no fresh seed has finished in both arms."
        difference = f"{metric} {self.paired.difference:+.4f} against the control over {self.paired.n} fresh seeds"
        if self.paired.interval is None:
            return f"Not confirmed: {difference}, too few for an interval; give --confirm 3 or more."
        low, high = self.paired.interval
        text = f"{difference}, 95% interval [{low:+.4f}, {high:+.4f}]"
        if self.is_better:
            return f"Better: {text}."
        is_worse = high < 0 if self.higher_is_better else low > 0
        if is_worse:
            return f"Worse: {text}."
        return f"Not better: {text}; no effect within ±{max(abs(low), abs(high)):.4f}."


def best_of(spec: SearchSpec, trials: Sequence[Trial]) -> Trial | None:
    """Return the finished trial with the best value; ties go to the earliest."""
    best: Trial | None = None
    for trial in trials:
        if trial.value is not None and (best is None or best.value is None or spec.better(trial.value, best.value)):
            best = trial
    return best


def arms_to_confirm(spec: SearchSpec, trials: Mapping[str, Sequence[Trial]]) -> tuple[Trial, Trial] | None:
    """Return the winner of the search and the best control, or None if an arm has no finished trial."""
    winner, control = best_of(spec, trials[SEARCH]), best_of(spec, trials[CONTROL])
    return None if winner is None or control is None else (winner, control)


def is_same(spec: SearchSpec, pair: tuple[Trial, Trial]) -> bool:
    """Return whether both arms arrived at the same model, trained in the same way."""
    recipes = [spec.cell(trial.arm, trial.number, trial.params).loaded for trial in pair]
    values = [recipe_to_dict(recipe) for recipe in recipes]
    for recipe, own in zip(recipes, values, strict=True):
        if (plan := plan_of(recipe)) is not None:
            own["model"] |= plan.recipe_keys()
    return values[0] == values[1]


def confirmation_cells(spec: SearchSpec, pair: tuple[Trial, Trial]) -> list[list[Cell]]:
    """Return the winner's run and the control's for each fresh seed, or nothing if the two are the same."""
    if is_same(spec, pair):
        return []
    return [
        [_cell(spec, trial, spec.space.base.seed + 1 + number) for trial in pair]
        for number in range(spec.confirmations)
    ]


def _cell(spec: SearchSpec, trial: Trial, seed: int) -> Cell:
    space = spec.arm(trial.arm)
    overrides = (*space.overrides(trial.params), override("seed", seed))
    name = f"{spec.name}-{NAMES[trial.arm]}{trial.number:03d}-seed{seed}"
    return Cell(name, space.recipe, overrides, trial.params, space.load(trial.params, seed))


def confirmation_of(spec: SearchSpec, pair: tuple[Trial, Trial], runs_dir: Path) -> Confirmation:
    """Return the comparison of the two arms over the fresh seeds that have finished."""
    values: dict[str, dict[str, float]] = {SEARCH: {}, CONTROL: {}}
    for cells in confirmation_cells(spec, pair):
        for trial, cell in zip(pair, cells, strict=True):
            value = finished_value(spec, runs_dir, cell)
            if value is not None:
                values[trial.arm][str(cell.loaded.seed)] = value
    paired = compare(values[SEARCH], values[CONTROL])
    return Confirmation(*pair, values, paired, spec.higher_is_better, is_same(spec, pair))
