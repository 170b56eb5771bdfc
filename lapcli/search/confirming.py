"""The best of each arm on fresh seeds: only an interval that leaves out zero calls the search's winner better.

The best of many trials at one seed is partly luck, more so the more trials there were. So the winner and the best
control are trained again on seeds that the search has not seen, and compared seed by seed.
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
    values: Mapping[str, Mapping[str, float]]  # of each arm by seed
    paired: Paired | None
    higher_is_better: bool
    is_same: bool = False  # the winner is the control

    @property
    def is_better(self) -> bool:
        if self.paired is None or self.paired.interval is None:
            return False
        low, high = self.paired.interval
        return low > 0 if self.higher_is_better else high < 0

    def verdict(self, metric: str) -> str:
        if self.is_same:
            return "The winner is the control itself: no head plan of the space was better than a constant one."
        if self.paired is None:
            return "Not confirmed: no fresh seed is finished in both arms."
        difference = f"{metric} {self.paired.difference:+.4f} against the control over {self.paired.n} fresh seeds"
        if self.paired.interval is None:
            return f"Not confirmed: {difference}, and there is no interval; give --confirm 3 or more."
        low, high = self.paired.interval
        text = f"{difference}, 95% interval [{low:+.4f}, {high:+.4f}]"
        if self.is_better:
            return f"Better: {text}."
        is_worse = high < 0 if self.higher_is_better else low > 0
        if is_worse:
            return f"Worse: {text}."
        return f"Not better: {text}; no effect within ±{max(abs(low), abs(high)):.4f}."


def best_of(spec: SearchSpec, trials: Sequence[Trial]) -> Trial | None:
    """The finished trial with the best value, the first of equals."""
    best: Trial | None = None
    for trial in trials:
        if trial.value is not None and (best is None or best.value is None or spec.better(trial.value, best.value)):
            best = trial
    return best


def arms_to_confirm(spec: SearchSpec, trials: Mapping[str, Sequence[Trial]]) -> tuple[Trial, Trial] | None:
    """The winner of the search and the best control; none if one of the arms has no finished trial."""
    winner, control = best_of(spec, trials[SEARCH]), best_of(spec, trials[CONTROL])
    return None if winner is None or control is None else (winner, control)


def is_same(spec: SearchSpec, pair: tuple[Trial, Trial]) -> bool:
    """Whether both arms have come to the same model, trained in the same way."""
    recipes = [spec.cell(trial.arm, trial.number, trial.params).loaded for trial in pair]
    values = [recipe_to_dict(recipe) for recipe in recipes]
    for recipe, own in zip(recipes, values, strict=True):
        if (plan := plan_of(recipe)) is not None:
            own["model"] |= plan.recipe_keys()
    return values[0] == values[1]


def confirmation_cells(spec: SearchSpec, pair: tuple[Trial, Trial]) -> list[list[Cell]]:
    """For each fresh seed the winner's run and the control's; none if they are the same."""
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


def confirmed(spec: SearchSpec, pair: tuple[Trial, Trial], runs_dir: Path) -> Confirmation:
    values: dict[str, dict[str, float]] = {SEARCH: {}, CONTROL: {}}
    for cells in confirmation_cells(spec, pair):
        for trial, cell in zip(pair, cells, strict=True):
            value = finished_value(spec, runs_dir, cell)
            if value is not None:
                values[trial.arm][str(cell.loaded.seed)] = value
    paired = compare(values[SEARCH], values[CONTROL])
    return Confirmation(*pair, values, paired, spec.higher_is_better, is_same(spec, pair))
