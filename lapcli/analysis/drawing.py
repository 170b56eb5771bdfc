"""What the figures of the measurements share: style, colours, labels of runs, common panels, and saving.

Runs are labelled by their number of Laplacian heads (`3L`) and ordered by it. Colours are steps of one scale that is
monotonic in brightness, and lines differ in their markers too, so that they can be told apart in print and by
colour-blind readers. matplotlib is imported inside functions, because the declarations of measurements import this
module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lapcli.analysis.analyze import Analysis, ModelResult

STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.hashsalt": "lap",  # the same figure gives the same file
}
MARKERS = "osD^vP*Xph"
LINES = ("-", "--", "-.", ":")
#: The colours of Okabe and Ito, for classes and shares, which have no order.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#7F3C8D")


def save_figure(analysis: Analysis, folder: Path) -> list[Path]:
    """Writes PNG and SVG and returns their paths; none if there is nothing to show."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = analysis.measurement.draw(analysis)
        if figure is None:
            return []
        paths = [folder / f"{analysis.what}.{form}" for form in ("png", "svg")]
        for path in paths:
            options: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 160}
            figure.savefig(path, bbox_inches="tight", **options)
    return paths


def panels(columns: int, rows: int = 1, width: float = 3.6, height: float = 2.9) -> tuple[Figure, np.ndarray]:
    """A figure with rows x columns axes; width and height are of one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def labels(runs: Sequence[ModelResult]) -> list[str]:
    """`3L`, with the name where two runs would have the same label."""
    plain = []
    for run in runs:
        counts = run.plan.per_layer
        text = f"{counts[0]}L" if len(set(counts)) == 1 else f"{run.plan.total / len(counts):.1f}L on average"
        plain.append(text if run.model.weights != "untrained" else f"{text}, untrained")
    return [
        text if plain.count(text) == 1 else f"{text} ({run.model.name})" for text, run in zip(plain, runs, strict=True)
    ]


def legend_title(runs: Sequence[ModelResult]) -> str:
    heads = {run.plan.heads for run in runs}
    return f"Laplacian heads\n(of {heads.pop()} in a layer)" if len(heads) == 1 else "Laplacian heads in a layer"


def styles(runs: Sequence[ModelResult]) -> list[dict[str, Any]]:
    """Colour, line and marker of each run; untrained models are grey."""
    import matplotlib as mpl

    trained = [run for run in runs if run.model.weights != "untrained"]
    steps = np.linspace(0.0, 0.82, max(len(trained), 2))
    styles: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        if run.model.weights == "untrained":
            styles.append({"color": "#888888", "linestyle": LINES[index % 3 + 1], "marker": MARKERS[index % 10]})
        else:
            place = steps[trained.index(run)]
            styles.append({"color": mpl.colormaps["viridis"](place), "linestyle": "-", "marker": MARKERS[index % 10]})
    return styles


def number_or_nan(value: float | int | None) -> float:
    return float("nan") if value is None else float(value)


def first_layer_values(runs: Sequence[ModelResult], name: str) -> list[float]:
    """One value of each run, of the first layer that was measured."""
    return [number_or_nan(next(iter(run.layers.values())).values[name]) for run in runs]


def plot_by_layer(axes: Any, runs: Sequence[ModelResult], name: str) -> None:
    """A value against the layer, one line for each run."""
    for run, style, label in zip(runs, styles(runs), labels(runs), strict=True):
        layers = list(run.layers)
        axes.plot(layers, [number_or_nan(run.layers[layer].values[name]) for layer in layers], label=label, **style)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (0: first block)")


def figure_by_layer(runs: Sequence[ModelResult], name: str, label: str) -> Figure:
    """A figure with one panel: a value against the layer."""
    figure, ((axes,),) = panels(1, width=4.6, height=3.0)
    plot_by_layer(axes, runs, name)
    axes.set_ylabel(label)
    axes.legend(title=legend_title(runs), loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def name_runs(axes: Any, runs: Sequence[ModelResult]) -> None:
    """Runs along the horizontal axis; long labels take two lines, and many long labels are upright."""
    shown = [label.replace(", ", "\n").replace(" (", "\n(") for label in labels(runs)]
    long = max(max(map(len, label.split("\n"))) for label in shown) > 6
    axes.set_xticks(range(len(runs)), shown, fontsize=7 if long else 9, rotation=90 if long and len(runs) > 3 else 0)
    axes.set_xlabel("Laplacian heads in a layer")


def plot_bars(axes: Any, runs: Sequence[ModelResult], values: Sequence[float]) -> None:
    """One bar for each run, with its value above it."""
    for place, (value, style) in enumerate(zip(values, styles(runs), strict=True)):
        axes.bar(place, value, width=0.62, color=style["color"], hatch="//" if style["linestyle"] != "-" else None)
        if np.isfinite(value):
            axes.annotate(
                f"{value:.1f}", (place, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
            )
    name_runs(axes, runs)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
