"""Write the result of a search to `RUNS_DIR/NAME.search/`.

winner.yaml   the winner's recipe, with the seed it was trained with
trials.csv    all trials of both arms
trials.png    scores against the number and depth of the heads
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.analysis.drawing import STYLE, panels
from lapcli.heads.plan import HeadPlan
from lapcli.recipe import recipe_to_yaml
from lapcli.runtime.files import make_folder, write_bytes, write_text
from lapcli.runtime.tables import fitted, to_csv
from lapcli.search.confirming import best_of
from lapcli.search.proposals import propose
from lapcli.search.runner import SearchOutcome
from lapcli.search.space import plan_of
from lapcli.search.trials import CONTROL, SEARCH, SearchSpec, Trial

_ARMS = {SEARCH: ("#0072B2", "o"), CONTROL: ("#D55E00", "s")}
_MOST_SHOWN = 30  # trials in the figure's right panel


def _plan(spec: SearchSpec, trial: Trial) -> HeadPlan | None:
    return plan_of(spec.cell(trial.arm, trial.number, trial.params).loaded)


def ordered(spec: SearchSpec, outcome: SearchOutcome) -> list[Trial]:
    """Return the finished trials from best to worst, then pruned, diverged and other trials."""
    every = [trial for trials in outcome.trials.values() for trial in trials]
    sign = -1 if spec.higher_is_better else 1
    order = {"pruned": 1, "diverged": 2}
    return sorted(
        every,
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
    folder = make_folder(runs_dir / f"{spec.name}.search")
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
