"""Figures of the grids: accuracy, k_alpha and variance shares against the number of Laplacian heads, training curves.

Each is one panel, so that a page can stack them on a narrow screen. A figure is drawn once: as a file it has its own
colours on white, in the page its text and lines take the page's colours, light or dark.
"""

import io
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.kinds import KINDS
from lapcli.report import paper
from lapcli.report.collect import RunResult
from lapcli.report.grouping import RunGrid, distinguishing_words
from lapcli.report.paper import data_set_of
from lapcli.report.paper_tables import DROP_PATH, by_drop_path
from lapcli.report.statistics import summarise
from lapcli.report.tables import column_of

#: Okabe and Ito's colours, which read on white and on black; lines differ in their markers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8a8a8a")
MARKERS = "osD^vPX"
_TEXT, _LINES = "#101112", "#c0c1c2"  # stand for the page's colours
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "lap",  # the same picture, the same file
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINES,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}
POINTS = 120  # of a training curve


@dataclass(frozen=True)
class Drawing:
    name: str  # of the files
    title: str
    caption: str
    svg: str  # as a file
    png: bytes

    def inline(self, number: int) -> str:
        """The drawing as a part of a page, in the page's colours and with ids that no other drawing has."""
        text = self.svg[self.svg.index("<svg") :]
        text = re.sub(r'\bid="', f'id="d{number}-', text)
        text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>d{number}-", text)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
        text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        return text.replace(_TEXT, "currentColor").replace(_LINES, "var(--line)")


def draw_all(grids: Sequence[RunGrid]) -> list[Drawing]:
    """Draws what the grids have numbers for."""
    import matplotlib as mpl

    runs = [run for grid in grids for run in grid.runs]
    drawings: list[Drawing] = []
    with mpl.rc_context(_STYLE):
        families = [
            family
            for objective in dict.fromkeys(run.objective for run in runs)
            for family in by_drop_path([run for run in runs if run.objective == objective])
        ]
        for number, (family, title) in enumerate(zip(families, _titles(families), strict=True)):
            drawings += [drawing for drawing in _draw_family(family, number, title) if drawing is not None]
    return drawings


def write_files(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for drawing in drawings:
        vector, picture = folder / f"{drawing.name}.svg", folder / f"{drawing.name}.png"
        vector.write_text(drawing.svg, encoding="utf-8")
        picture.write_bytes(drawing.png)
        paths += [vector, picture]
    return paths


def _titles(families: Sequence[Sequence[RunGrid]]) -> list[str]:
    """Objective and data; where that is the same for several, also the keys in which they differ."""
    plain = [_plain_title(family[0].runs[0]) for family in families]
    titles = []
    for family, title in zip(families, plain, strict=True):
        same = [other[0] for other, name in zip(families, plain, strict=True) if name == title]
        place = next(number for number, grid in enumerate(same) if grid is family[0])
        words = distinguishing_words(same, [DROP_PATH], 2)[place]
        titles.append(f"{title}; {words}" if words else title)
    return titles


def _plain_title(run: RunResult) -> str:
    what = data_set_of(run) or str(run.info.get("data", "")).split(":")[0] or "runs"
    stage = f" {run.recipe['stage']}" if run.recipe.get("stage") else ""
    return f"{run.objective.replace('_', ' ')}{stage}, {what}"


def _draw_family(family: Sequence[RunGrid], number: int, title: str) -> list[Drawing | None]:
    """The figures of grids that differ in the drop path alone, a line for each grid."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{number + 1}-{title}".lower()).strip("-")[:60]
    metrics = {metric for grid in family for metric in grid.metrics()}
    shares = [m for m in ("between_class", "within_class", "within_sequence") if f"anova.{m}_share" in metrics]
    components = [m for m in ("spectrum.k_0.9", "spectrum.k_0.99", "spectrum.k_0.999") if m in metrics]
    return [
        *(
            _against_heads(family, lines, f"{name}-{what}", title, label)
            for what, lines, label in _scores(family[0].objective, metrics)
        ),
        _against_heads(
            family[:1],
            {m: m.removeprefix("spectrum.") for m in components},
            f"{name}-components",
            title,
            "components of the tokens' variance",
        )
        if components
        else None,
        _against_heads(
            family[:1],
            {f"anova.{m}_share": m.replace("_", " ") for m in shares},
            f"{name}-shares",
            title,
            "share of the tokens' variance (%)",
        )
        if shares
        else None,
        *(_curves(grid, f"{name}-loss-{place + 1}", title) for place, grid in enumerate(family)),
    ]


def _scores(objective: str, metrics: Collection[str]) -> list[tuple[str, dict[str, str], str]]:
    """(name, measures with the names of their lines, label of the axis) of what tells how good the models are.

    Where nothing was evaluated that is the validation, by another number than the loss if the kind has one.
    """
    kind = KINDS[objective]
    single = [name for name in dict.fromkeys((*kind.expected_scores, *paper.SELF_SUPERVISED)) if name in metrics]
    tasks = {task: column_of(task).label.removesuffix(" (%)") for task in paper.LANGUAGE if task in metrics}
    if not single and not tasks:
        validated = sorted(kind.metrics, key=lambda name: name.endswith("_loss"))
        single = [name for name in validated if name in metrics][:1]
    scores = [(name, {name: name}, column_of(name).label) for name in single]
    return [*scores, *([("tasks", tasks, "accuracy (%)")] if tasks else [])]


def _against_heads(
    family: Sequence[RunGrid], metrics: dict[str, str], name: str, title: str, label: str
) -> Drawing | None:
    """Means with their deviations as a band: a line for each drop path, or for each of several measures."""
    figure, axes = _panel()
    drawn: list[_Point] = []
    lines = 0
    for place, (grid, metric) in enumerate((grid, metric) for grid in family for metric in metrics):
        points = _points(grid, metric)
        if not points:
            continue
        drawn += points
        lines += 1
        style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        drop_path = f"drop path {grid.identity.get(DROP_PATH, 'none')}"
        even = [point for point in points if not point.differs]
        x = [point.heads for point in even]
        axes.plot(x, [p.mean for p in even], **style, label=metrics[metric] if len(metrics) > 1 else drop_path)
        low, high = [p.mean - p.deviation for p in even], [p.mean + p.deviation for p in even]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
        for point in points:
            if point.differs:
                axes.errorbar(point.heads, point.mean, point.deviation, **style, markerfacecolor="none", capsize=2)
    if not drawn:
        return None
    axes.set_xlabel(_row_label(family[0]))
    axes.set_ylabel(_safe(label))
    ticks = sorted({point.heads for point in drawn})
    axes.set_xticks(ticks, [f"{number:.3g}" for number in ticks])
    if lines > 1 or len(metrics) > 1:
        axes.legend()
    fewest, most = min(point.n for point in drawn), max(point.n for point in drawn)
    seeds = f"{fewest} to {most} seeds" if fewest < most else f"{most} seed{'s' if most > 1 else ''}"
    caption = (
        f"{label} against the number of Laplacian heads; means over {seeds}, band: one standard deviation (ddof 1)."
    )
    if any(point.differs for point in drawn):
        caption += " Hollow: plans that differ by layer, at their mean."
    return Drawing(name, title, caption, *_files(figure))


class _Point(NamedTuple):
    heads: float  # a layer, on average
    mean: float
    deviation: float
    n: int
    differs: bool  # by layer


def _points(grid: RunGrid, metric: str) -> list[_Point]:
    scale = column_of(metric).scale
    summaries = {row: summarise(list(grid.values(row, metric).values()), 1) for row in grid.rows}
    return [
        _Point(row.order[0], scale * summary.mean, scale * (summary.std or 0.0), summary.n, row.heads is None)
        for row, summary in summaries.items()
        if summary is not None
    ]


def _curves(grid: RunGrid, name: str, title: str) -> Drawing | None:
    """The training loss of each run, averaged over stretches of steps."""
    figure, axes = _panel()
    drawn = 0
    for place, (row, runs) in enumerate(grid.rows.items()):
        for number, run in enumerate(runs.values()):
            points = _stretches(
                [(line["step"], line["loss"]) for line in run.curve if isinstance(line.get("loss"), int | float)]
            )
            if not points:
                continue
            drawn += 1
            x, y = zip(*points, strict=True)
            label = _safe(f"{row.label}") if number == 0 else None
            axes.plot(x, y, color=COLOURS[place % len(COLOURS)], linewidth=1.1, alpha=0.85, label=label)
    if not drawn:
        return None
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    if len(grid.rows) <= 12:
        figure.legend(title=_row_label(grid).replace(" (", "\n("), loc="outside right upper")
    drop_path = f", drop path {grid.identity[DROP_PATH]}" if DROP_PATH in grid.identity else ""
    caption = (
        f"Training loss of {drawn} runs{drop_path}, each point a mean over a stretch of steps (at most {POINTS} points "
        "a run)."
    )
    return Drawing(name, title, caption, *_files(figure))


def _stretches(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // POINTS) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _row_label(grid: RunGrid) -> str:
    heads = {(run.recipe.get("model") or {}).get("heads") for run in grid.runs}
    return f"Laplacian heads (of {heads.pop()})" if len(heads) == 1 and None not in heads else "Laplacian heads"


def _panel() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.0), layout="constrained")
    return figure, figure.subplots()


def _files(figure: Any) -> tuple[str, bytes]:
    text, picture = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    figure.savefig(picture, format="png", dpi=160)
    return text.getvalue(), picture.getvalue()


def _safe(text: str) -> str:
    """Escapes dollar signs, between which matplotlib would read mathematics."""
    return text.replace("$", r"\$")
