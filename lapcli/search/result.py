"""Confirm the winner of a search on fresh seeds, and write the result to `RUNS_DIR/NAME.search/`.

The best of many trials at one seed is partly luck, and more so the more trials there are. Therefore the winner and the
best control are trained again with seeds that the search has not used, and compared seed by seed: the winner counts as
better only if the interval of the difference excludes zero.

winner.yaml   the winner's recipe, with the seed it was trained with
trials.csv    all trials of both arms
trials.png    scores against the number and depth of the heads
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.analysis.drawing import STYLE, panels
from lapcli.heads.plan import HeadPlan
from lapcli.recipe import recipe_to_dict, recipe_to_yaml
from lapcli.report.statistics import Paired, compare
from lapcli.runtime.files import write_bytes, write_text
from lapcli.runtime.tables import fitted, to_csv
from lapcli.search.proposals import propose
from lapcli.search.space import plan_of
from lapcli.search.trials import CONTROL, SEARCH, SearchSpec, Trial, finished_value
from lapcli.sweep.grid import Cell, override

_ARMS = {SEARCH: ("#0072B2", "o"), CONTROL: ("#D55E00", "s")}
_MOST_SHOWN = 30  # trials in the figure's right panel
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


@dataclass
class SearchOutcome:
    trials: dict[str, list[Trial]]
    confirmation: Confirmation | None = None
    notes: list[str] = field(default_factory=list)


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
            # One notation for both: `2` and `[2, 2, 2]` are the same plan.
            own["model"] |= plan.recipe_keys()
    return values[0] == values[1]


def confirmation_cells(spec: SearchSpec, pair: tuple[Trial, Trial]) -> list[list[Cell]]:
    """Return the winner's run and the control's for each fresh seed, or nothing if the two are the same."""
    if is_same(spec, pair):
        return []
    return [
        # Every trial was trained with the base seed, so that these seeds have chosen nothing.
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


def _plan(spec: SearchSpec, trial: Trial) -> HeadPlan | None:
    return plan_of(spec.cell(trial.arm, trial.number, trial.params).loaded)


def ordered(spec: SearchSpec, outcome: SearchOutcome) -> list[Trial]:
    """Return the finished trials from best to worst, then pruned, diverged and other trials."""
    every = [trial for trials in outcome.trials.values() for trial in trials]
    sign = -1 if spec.higher_is_better else 1
    order = {"pruned": 1, "diverged": 2}
    return sorted(
        every,
        # `sign` and not `reverse`: trials without a value come last in either direction.
        key=lambda t: (t.value is None, sign * t.value if t.value is not None else 0, order.get(t.state, 3), t.name),
    )


def _rows(spec: SearchSpec, outcome: SearchOutcome) -> tuple[list[str], list[list[Any]]]:
    keys = [domain.key for domain in spec.space.domains if not domain.is_plan]
    header = ["trial", "arm", "state", "step", "heads", "plan", *keys, spec.metric]
    rows: list[list[Any]] = []
    for trial in ordered(spec, outcome):
        plan, space = _plan(spec, trial), spec.arm(trial.arm)
        values = {domain.key: domain.value(trial.params) for domain in space.domains}
        score = trial.value if trial.value is not None else trial.reports[-1][1] if trial.reports else None
        heads = ["", ""] if plan is None else [sum(plan.counts().values()), plan.label()]
        own = [values.get(key, "") for key in keys]
        rows.append([trial.name, trial.arm, trial.state, trial.step, *heads, *own, score])
    return header, rows


def table(spec: SearchSpec, outcome: SearchOutcome) -> str:
    """Return the trials as a text table; a trial without a final value shows its last validation."""
    header, rows = _rows(spec, outcome)
    shown = [[_shown(value) for value in row] for row in rows]
    return "\n".join(fitted([header, *shown]))


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(spec: SearchSpec) -> str:
    """Return the text of `--dry-run`: each arm's parameters, the number of combinations and the first proposal."""
    lines = []
    for arm in (SEARCH, CONTROL):
        space = spec.arm(arm)
        size = space.size()
        count = "infinitely many combinations" if size is None else f"{size:,} combination{'s' if size != 1 else ''}"
        lines.append(f"{arm}: {count}, at most {spec.trials if size is None else min(spec.trials, size):,} trials")
        first = propose(spec, arm, []) or {}
        rows = [("parameter", "domain", "first proposal")]
        for parameter in space.parameters:
            ends = " ".join(map(str, parameter.ends())) if parameter.choices else f"{parameter.low} to {parameter.high}"
            rows.append((parameter.name, ends + (", log" if parameter.log else ""), _shown(first[parameter.name])))
        lines += [f"  {line}" for line in fitted(rows)] if len(rows) > 1 else ["  the recipe itself"]
    seeds = f"the best of each arm on {spec.confirmations} fresh seed{'s' if spec.confirmations != 1 else ''}"
    return "\n".join(
        [*lines, f"then {seeds}; {spec.metric}, {'higher' if spec.higher_is_better else 'lower'} is better"]
    )


def as_data(spec: SearchSpec, outcome: SearchOutcome) -> dict[str, Any]:
    """Return the trials and the confirmation as the data of `--json`."""
    header, rows = _rows(spec, outcome)
    confirmation = outcome.confirmation
    data: dict[str, Any] = {"search": spec.name, "metric": spec.metric, "trials": []}
    data["trials"] = [dict(zip([*header[:-1], "value"], row, strict=True)) for row in rows]
    if confirmation is not None:
        paired = confirmation.paired
        data["confirmation"] = {
            "winner": confirmation.winner.name,
            "control": confirmation.control.name,
            "values": {arm: dict(values) for arm, values in confirmation.values.items()},
            "difference": None if paired is None else paired.difference,
            "interval": None if paired is None else paired.interval,
            "p": None if paired is None else paired.p,
            "better": confirmation.is_better,
        }
    return data


def write_result(spec: SearchSpec, outcome: SearchOutcome, runs_dir: Path) -> list[Path]:
    """Write the result's files and return their paths; without a finished trial there is no winner.yaml."""
    folder = runs_dir / f"{spec.name}.search"
    folder.mkdir(parents=True, exist_ok=True)
    header, rows = _rows(spec, outcome)
    write_text(folder / "trials.csv", to_csv(header, rows))
    paths = [folder / "trials.csv"]
    winner = best_of(spec, outcome.trials[SEARCH])
    if winner is not None:
        recipe = spec.cell(winner.arm, winner.number, winner.params).loaded
        write_text(folder / "winner.yaml", recipe_to_yaml(recipe))
        paths = [folder / "winner.yaml", *paths]
        if plan_of(recipe) is not None:
            write_bytes(folder / "trials.png", draw(spec, ordered(spec, outcome)))
            paths.append(folder / "trials.png")
    return paths


def draw(spec: SearchSpec, trials: Sequence[Trial]) -> bytes:
    """Return a PNG. Left: score against number of heads, larger markers for deeper heads. Right: plans, best on top."""
    import matplotlib as mpl
    from matplotlib.ticker import MaxNLocator

    scored = [trial for trial in trials if trial.value is not None]
    plans = [_counts(plan) for trial in scored if (plan := _plan(spec, trial)) is not None]
    with mpl.rc_context(STYLE):
        figure, axes = panels(2, 1, width=4.2, height=3.4)
        left, right = axes[0]
        for arm, (colour, marker) in _ARMS.items():
            points = [
                (sum(counts), trial.value, _depth(counts))
                for trial, counts in zip(scored, plans, strict=True)
                if trial.arm == arm
            ]
            if points:
                x, y, depth = zip(*points, strict=True)
                sizes = [20 + 60 * part for part in depth]
                left.scatter(x, y, s=sizes, c=colour, marker=marker, alpha=0.75, label=f"{arm}", linewidths=0)
        left.set_xlabel("heads other than plain attention, all layers\n(larger markers: closer to the last layer)")
        left.set_ylabel(spec.metric.replace("_", " "))
        left.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        # Above the axes: inside them, the legend's markers would look like trials.
        left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        shown = list(zip(scored, plans, strict=True))[:_MOST_SHOWN]
        grid = np.array([counts for _, counts in shown])
        picture = right.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=max(1, int(grid.max())))
        right.grid(False)
        right.set_xlabel("layer")
        right.set_xticks(range(grid.shape[1]))
        for row in range(1, len(shown)):
            right.axhline(row - 0.5, color="white", linewidth=1)
        labels = [f"{trial.value:.5g}{' c' if trial.arm == CONTROL else ''}" for trial, _ in shown]
        right.set_yticks(range(len(shown)), labels, fontsize=6)
        right.set_ylabel(f"{spec.metric.replace('_', ' ')}, best first (c: control)")
        figure.colorbar(picture, ax=right, label="heads").locator = MaxNLocator(6, integer=True)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _counts(plan: HeadPlan) -> list[int]:
    """Return how many heads of each layer are not plain attention."""
    return [sum(claim.heads for claim in layer if claim.operator.name != "attention") for layer in plan.layers]


def _depth(counts: Sequence[int]) -> float:
    """Return the mean depth of the heads: 0 if all are in the first layer, 1 if all are in the last."""
    total, last = sum(counts), max(1, len(counts) - 1)
    return 0.5 if total == 0 else sum(layer * count for layer, count in enumerate(counts)) / total / last
