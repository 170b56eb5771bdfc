"""The charts of runs: training and validation curves; scores, k_alpha and variance shares against the heads.

An experiment is a set of runs that differ only in Laplacian heads, drop path and seed; its charts stand together. Each
chart is one panel, so that a page can stack them on a narrow screen.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lapcli.analysis.drawing import FORMS, FigureFormat
from lapcli.recipe import OBJECTIVES
from lapcli.report import paper
from lapcli.report.chart import COLOURS, Chart, Line, plan_colours
from lapcli.report.collect import RunResult
from lapcli.report.forms import write_for_user
from lapcli.report.grouping import RowKey, RunGrid, data_in_words, distinguishing_words, kind_in_words
from lapcli.report.paper import data_set_of
from lapcli.report.paper_tables import DROP_PATH, by_drop_path
from lapcli.report.statistics import is_number, summarise
from lapcli.report.tables import column_of
from lapcli.runs import time_of
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_bytes

POINTS = 120  # of a training curve
_NARROWEST = 0.05  # share of a value that an axis shows at least, if its noise is not known


@dataclass
class Experiment:
    """Grids that differ only in the drop path."""

    number: int  # on the page, from 1
    title: str
    grids: list[RunGrid]
    charts: list[Chart] = field(default_factory=list)

    @property
    def runs(self) -> list[RunResult]:
        return [run for grid in self.grids for run in grid.runs]

    @property
    def plans(self) -> dict[str, list[RunResult]]:
        """The runs by the label of their plan, in the order of the plans."""
        rows = sorted({row for grid in self.grids for row in grid.rows})
        return {plan_name(row): [run for grid in self.grids for run in grid.rows.get(row, {}).values()] for row in rows}


def plan_name(row: RowKey) -> str:
    """Return `0 Laplacian`, `3 Laplacian`, or the label of a plan that differs by layer."""
    return f"{row.heads} Laplacian" if row.heads is not None else row.label


def experiments_of(grids: Sequence[RunGrid]) -> list[Experiment]:
    """Return the experiments with their charts, the one that changed last first."""
    runs = [run for grid in grids for run in grid.runs]
    families = [
        family
        for objective in dict.fromkeys(run.objective for run in runs)
        for family in by_drop_path([run for run in runs if run.objective == objective])
    ]
    families.sort(key=_last_change, reverse=True)
    made = []
    for number, (family, title) in enumerate(zip(families, _titles(families), strict=True), 1):
        experiment = Experiment(number, title, list(family))
        experiment.charts = [chart for chart in _charts(experiment) if chart is not None]
        made.append(experiment)
    return made


def _last_change(family: Sequence[RunGrid]) -> float:
    return max(time_of(run.info) for grid in family for run in grid.runs)


def draw_all(grids: Sequence[RunGrid]) -> list[Chart]:
    return [chart for experiment in experiments_of(grids) for chart in experiment.charts]


def write_files(charts: Sequence[Chart], folder: Path, forms: Sequence[str], figure_format: FigureFormat) -> list[Path]:
    """Write each chart in these formats, and its data as CSV."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; the figures need a folder of that name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # old files of runs that were removed or have another number on the page
            # Only names that charts have: the folder of --out may hold the user's own files.
            if path.suffix.removeprefix(".") in (*FORMS, "csv") and re.match(r"\d+-", path.name):
                path.unlink()
        paths = []
        for chart in charts:
            for form in forms:
                paths.append(folder / f"{chart.name}.{form}")
                write_bytes(paths[-1], chart.file(form, figure_format))
            paths.append(folder / f"{chart.name}.csv")
            write_for_user(paths[-1], chart.csv())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); name another place with --out") from None
    return paths


def _titles(families: Sequence[Sequence[RunGrid]]) -> list[str]:
    """Return kind and data of each family; if several have the same, also what tells them apart."""
    plain = [_plain_title(family[0].runs[0]) for family in families]
    titles = []
    for family, title in zip(families, plain, strict=True):
        same = [other[0] for other, name in zip(families, plain, strict=True) if name == title]
        place = next(number for number, grid in enumerate(same) if grid is family[0])
        words = distinguishing_words(same, [DROP_PATH], 2)[place]
        titles.append(f"{title}; {words}" if words else title)
    return titles


def _plain_title(run: RunResult) -> str:
    kind = kind_in_words(run)
    what = data_set_of(run) or data_in_words(run)
    return f"{kind[:1].upper()}{kind[1:]}" + (f" on {what}" if what else "")


def _charts(experiment: Experiment) -> list[Chart | None]:
    family, title = experiment.grids, experiment.title
    name = re.sub(r"[^a-z0-9]+", "-", f"{experiment.number}-{title}".lower()).strip("-")[:60]
    metrics = {metric for grid in family for metric in grid.metrics()}
    shares = [m for m in ("between_class", "within_class", "within_sequence") if f"anova.{m}_share" in metrics]
    components = {f"spectrum.k_{a}": f"{float(a):.4g}" for a in ("0.9", "0.99", "0.999")}
    components = {
        m: f"{float(share):.1%} of the variance".replace(".0%", "%") for m, share in components.items() if m in metrics
    }
    curves: list[Chart | None] = []
    for place, grid in enumerate(family):
        number = f"-{place + 1}" if len(family) > 1 else ""
        drawn = ["loss", *_validated(grid)]
        curves += [_curves(experiment, grid, metric, f"{name}-{metric.replace('_', '-')}{number}") for metric in drawn]
    against: list[tuple[Sequence[RunGrid], str, dict[str, str], str]] = [
        *((family, what, lines, label) for what, lines, label in _scores(family[0].objective, metrics)),
        (family[:1], "components", components, "components of the tokens"),
        (
            family[:1],
            "shares",
            {
                f"anova.{m}_share": m.replace("_", " ").replace("class", "classes" if m[0] == "b" else "class")
                for m in shares
            },
            "share of the tokens' variance (%)",
        ),
    ]
    return [
        *curves,
        *(
            _against_heads(grids, lines, f"{name}-{what.replace('_', '-')}-by-heads", label)
            for grids, what, lines, label in against
            if lines
        ),
    ]


def _validated(grid: RunGrid) -> list[str]:
    """Return the validation's loss, and the first other number that the kind of training gives."""
    seen = {key for run in grid.runs for line in run.curve for key in line if key.startswith("validation_")}
    metrics = [metric for metric in OBJECTIVES[grid.objective].metrics if metric in seen]
    losses = [metric for metric in metrics if metric.endswith("_loss")]
    return [*losses[:1], *[metric for metric in metrics if metric not in losses][:1]]


def _curves(experiment: Experiment, grid: RunGrid, metric: str, name: str) -> Chart | None:
    """Draw a thin line for each run in its plan's colour; training losses are averaged over stretches of steps."""
    colours = plan_colours(list(experiment.plans))
    column = column_of(metric)
    lines = []
    for row, runs in grid.rows.items():
        for run in runs.values():
            values: list[tuple[float, float]] = [
                (int(line["step"]), line[metric] * column.scale) for line in run.curve if is_number(line.get(metric))
            ]
            points = _stretches(values) if metric == "loss" else values
            if points:
                colour, dash = colours[plan_name(row)]
                lines.append(Line(plan_name(row), colour, points, run.name, plan_name(row), dash, is_thin=True))
    if not lines:
        return None
    label = "training loss" if metric == "loss" else column.label
    drop_path = f", drop path {grid.identity[DROP_PATH]}" if len(experiment.grids) > 1 else ""
    averaged = any(len(run.curve) > POINTS for run in grid.runs) and metric == "loss"
    how = f"; a point is a mean over a stretch of steps, at its last step (at most {POINTS} points)" if averaged else ""
    runs_text = f"{len(lines)} run{'s' if len(lines) > 1 else ''}"
    caption = f"A colour for each plan, a thin line for each run ({runs_text}){how}."
    return Chart(
        name,
        f"{label[:1].upper()}{label[1:]}{drop_path}",
        caption,
        "step",
        label,
        lines,
        legend_title=_row_label(grid).replace(" (", "\n("),
        experiment=experiment.number,
    )


def _stretches(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // POINTS) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    # At the last step of a stretch, so that the curve ends where the training did.
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def _scores(objective: str, metrics: Collection[str]) -> list[tuple[str, dict[str, str], str]]:
    """Return (name, measures with the names of their lines, label of the axis) of each score to draw.

    If nothing was evaluated, it is the validation: another number than the loss if the kind has one.
    """
    kind = OBJECTIVES[objective]
    single = [name for name in dict.fromkeys((*kind.expected_scores, *paper.SELF_SUPERVISED)) if name in metrics]
    tasks = {task: column_of(task).label.removesuffix(" (%)") for task in paper.LANGUAGE if task in metrics}
    if not single and not tasks:
        validated = sorted(kind.metrics, key=lambda name: name.endswith("_loss"))
        single = [name for name in validated if name in metrics][:1]
    scores = [(name, {name: name}, column_of(name).label) for name in single]
    return [*scores, *([("tasks", tasks, "accuracy (%)")] if tasks else [])]


class _Point(NamedTuple):
    heads: float  # in a layer, on average
    mean: float
    deviation: float | None  # None: one seed
    n: int
    differs: bool  # by layer
    operator: str  # the row's label if heads have other operators; else empty
    noise: float  # half the width of its interval: two deviations over seeds, else two binomial errors


def _against_heads(family: Sequence[RunGrid], metrics: dict[str, str], name: str, label: str) -> Chart | None:
    """Draw means against the heads: a line for each drop path, or for each of several measures; a band if there are
    several seeds."""
    lines: list[Line] = []
    drawn: list[_Point] = []
    places = _operator_places(family)
    for place, (grid, metric) in enumerate((grid, metric) for grid in family for metric in metrics):
        points = [point._replace(heads=places.get(point.operator, point.heads)) for point in _points(grid, metric)]
        if not points:
            continue
        drawn += points
        even = [point for point in points if not point.differs]
        drop_path = f"drop path {grid.identity.get(DROP_PATH, 'none')}"
        lines.append(
            Line(
                metrics[metric] if len(metrics) > 1 else drop_path,
                COLOURS[place % len(COLOURS)],
                [(point.heads, point.mean) for point in even],
                style=place,
                # NaN leaves a hole in the band where a point has one seed; 0 would look like certainty.
                low=[point.mean - _or_nan(point.deviation) for point in even],
                high=[point.mean + _or_nan(point.deviation) for point in even],
                n=[point.n for point in even],
                hollow=[(point.heads, point.mean, point.deviation or 0.0) for point in points if point.differs],
            )
        )
    if len({point.heads for point in drawn}) < 2:  # a single point shows no more than the table
        return None
    fewest, most = min(point.n for point in drawn), max(point.n for point in drawn)
    seeds = f"{fewest} to {most} seeds" if fewest < most else f"{most} seed{'s' if most > 1 else ''}"
    caption = "One seed, so no band and no deviation."
    if most > 1:
        caption = (
            f"Means over {seeds}; bars and band are one standard deviation (ddof 1), and the axis shows at least two "
            "of them to either side."
        )
    if places:
        caption += " Hollow on the right: other operators."
    if any(point.differs and not point.operator for point in drawn):
        caption += " Hollow: plans that differ by layer, at their mean."
    is_share = "%" in label
    edges = [point.mean - point.noise for point in drawn], [point.mean + point.noise for point in drawn]
    low, high = min(edges[0]), max(edges[1])
    return Chart(
        name,
        f"{label[:1].upper()}{label[1:]} by Laplacian heads",
        caption,
        _row_label(family[0]),
        label,
        lines,
        sorted({point.heads for point in drawn}),
        (max(low, 0.0), min(high, 100.0)) if is_share else (low, high),
        x_names={place: name for name, place in places.items()},
    )


def _operator_places(family: Sequence[RunGrid]) -> dict[str, float]:
    """Return the places of rows with other operators on an axis of Laplacian heads: to the right of all others."""
    names = dict.fromkeys(name for grid in family for row in grid.rows if (name := _operator_of(grid, row)))
    right = max((grid.all_heads for grid in family), default=0) + 1
    return {name: float(right + number) for number, name in enumerate(names)}


def _operator_of(grid: RunGrid, row: RowKey) -> str:
    """Return the label of a row with other operators, else empty: such rows have an order above the number of heads."""
    return row.label if row.order[0] > grid.all_heads else ""


def _or_nan(deviation: float | None) -> float:
    """Return NaN for a point of one seed, which has no band."""
    return math.nan if deviation is None else deviation


def _points(grid: RunGrid, metric: str) -> list[_Point]:
    scale = column_of(metric, grid.number(metric)).scale
    points = []
    for row in grid.rows:
        summary = summarise(list(grid.values(row, metric).values()), 1)
        if summary is None:
            continue
        counts = [run.numbers[metric].count for run in grid.rows[row].values() if metric in run.numbers]
        noise = _NARROWEST * abs(summary.mean) / 2
        if summary.std is not None:
            # A floor of 0.25% of the mean, for seeds that all have the same score.
            noise = max(2 * summary.std, noise / 10)
        elif scale == 100 and counts and counts[0] and metric.split(" [")[0] in {"top1", "top5", *paper.LANGUAGE}:
            noise = 2 * math.sqrt(max(summary.mean * (1 - summary.mean), 0.0) / counts[0])
        deviation = None if summary.std is None else scale * summary.std
        points.append(
            _Point(
                row.order[0],
                scale * summary.mean,
                deviation,
                summary.n,
                row.heads is None,
                _operator_of(grid, row),
                scale * noise,
            )
        )
    return points


def _row_label(grid: RunGrid) -> str:
    heads = {(run.recipe.get("model") or {}).get("heads") for run in grid.runs}
    return f"Laplacian heads (of {heads.pop()})" if len(heads) == 1 and None not in heads else "Laplacian heads"
