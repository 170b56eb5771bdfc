"""Shared parts of the measurements' figures: style, colours, labels of runs, common panels, and saving.

Runs are labelled by their number of Laplacian heads and ordered by it: `3 Laplacian` and the model's name in legends,
`3L` where there is no room. Colours are steps of one scale that is monotonic in brightness, and lines differ in their
markers too, so that they can be told apart in print and by colour-blind readers. matplotlib is imported inside
functions, because the declarations of measurements import this module.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_bytes

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
    "pdf.fonttype": 42,  # text that can be searched and edited
}
MARKERS = "osD^vP*Xph"
LINES = ("-", "--", "-.", ":")
#: The colours of Okabe and Ito, for classes and shares, which have no order.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#7F3C8D")


FORMS = ("png", "svg", "pdf")
#: Metadata without a date, so that the same figure gives the same file.
UNDATED: dict[str, Any] = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class FigureFormat:
    """How figures are written: size in inches, resolution, and file formats."""

    size: tuple[float, float] | None = None
    dpi: int = 160
    forms: tuple[str, ...] = ("png", "svg")


def size_of(text: str) -> tuple[float, float]:
    """Parse width and height in inches from `6x4`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[xX,]\s*(\d+(?:\.\d+)?)\s*", text)
    size = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not all(1 <= side <= 50 for side in size):
        raise UsageError(f"--size {text[:40]!r}: expected width x height in inches, each from 1 to 50, as in 6x4")
    return size


def forms_of(text: str) -> tuple[str, ...]:
    """Parse one file format or several with commas between them."""
    forms = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for form in forms:
        if form not in FORMS:
            raise UsageError(f"--format {form[:20]!r} is not a figure format; use one of {', '.join(FORMS)}")
    return forms


def save_figure(analysis: Analysis, folder: Path, figure_format: FigureFormat | None = None) -> list[Path]:
    """Write the figure in each format and return the paths; an empty list if there is nothing to show."""
    import matplotlib as mpl

    figure_format = figure_format or FigureFormat()

    with mpl.rc_context(STYLE):
        figure = analysis.measurement.draw(analysis)
        if figure is None:
            return []
        if figure_format.size is not None:
            figure.set_size_inches(*figure_format.size)
        paths = [folder / f"{analysis.what}.{form}" for form in figure_format.forms]
        for path in paths:
            cut = "tight" if figure_format.size is None else None  # a requested size is not cropped
            content, form = io.BytesIO(), path.suffix[1:]
            figure.savefig(content, format=form, bbox_inches=cut, dpi=figure_format.dpi, metadata=UNDATED.get(form))
            write_bytes(path, content.getvalue())
    return paths


def panels(columns: int, rows: int = 1, width: float = 3.6, height: float = 2.9) -> tuple[Figure, np.ndarray]:
    """Create a figure with rows x columns axes; `width` and `height` are those of one panel."""
    from matplotlib.figure import Figure

    # Not pyplot, which keeps every figure alive until it is closed and chooses a backend for the whole process.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


_MOST_NAMED = 3  # operators in a label; more would make the legend wider than its figure


def labels(runs: Sequence[ModelResult]) -> list[str]:
    """Return short labels such as `3L`, with the run's name if two runs would have the same label."""
    plain = []
    for run in runs:
        operators, layers = run.plan.counts(), len(run.plan.layers)
        if run.plan.is_laplacian:
            text = f"{run.plan.total / layers:.3g}L"
        elif len(operators) > _MOST_NAMED:
            text = f"{sum(operators.values()) / layers:.3g} of {len(operators)} operators"
        else:
            text = ", ".join(f"{count / layers:.3g} {name}" for name, count in operators.items())
        if len(set(run.plan.layers)) > 1:
            text += " on average"
        plain.append(text if run.model.weights != "untrained" else f"{text}, untrained")
    return [
        text if plain.count(text) == 1 else f"{text} ({run.model.name})" for text, run in zip(plain, runs, strict=True)
    ]


_LONGEST = 30  # characters of a model's name in a legend


def legend_labels(runs: Sequence[ModelResult]) -> list[str]:
    """Return labels of head plan and model, such as `3 Laplacian: vit_digits_3L`."""
    named = []
    for run, label in zip(runs, long_labels(runs), strict=True):
        name = run.model.name
        short = name if len(name) <= _LONGEST else f"{name[:14]}...{name[-13:]}"
        named.append(f"{label}: {short}".replace("$", r"\$"))  # else matplotlib reads mathematics
    return named


def long_labels(runs: Sequence[ModelResult]) -> list[str]:
    """Return long labels such as `3 Laplacian` and `3 Laplacian, untrained`."""
    return [re.sub(r"^([\d.]+)L", r"\1 Laplacian", label.split(" (")[0]) for label in labels(runs)]


def title_labels(runs: Sequence[ModelResult]) -> list[str]:
    """Return titles such as `3 Laplacian`, with the run's name below if two runs would have the same title."""
    return [re.sub(r"^([\d.]+)L", r"\1 Laplacian", label).replace(" (", "\n(") for label in labels(runs)]


def show_at_least(axes: Any, share: float = 0.1) -> None:
    """Widen the vertical axis to at least this share of its largest value, so that noise does not fill the panel."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if not (np.isfinite(low) and np.isfinite(high)):
        return
    missing = share * max(abs(low), abs(high)) - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def legend_title(runs: Sequence[ModelResult]) -> str:
    heads = {run.plan.heads for run in runs}
    what = "Heads by operator" if not all(run.plan.is_laplacian for run in runs) else "Laplacian heads"
    return f"{what}\n(of {heads.pop()} in a layer)" if len(heads) == 1 else f"{what} in a layer"


def styles(runs: Sequence[ModelResult]) -> list[dict[str, Any]]:
    """Return colour, line and marker of each run; untrained models are grey."""
    import matplotlib as mpl

    trained = [run for run in runs if run.model.weights != "untrained"]
    steps = np.linspace(0.0, 0.82, max(len(trained), 2))  # the bright end of viridis is hard to see on white
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
    """Return one value per run, at the first layer that was measured."""
    return [number_or_nan(next(iter(run.layers.values())).values[name]) for run in runs]


def plot_by_layer(axes: Any, runs: Sequence[ModelResult], name: str) -> None:
    """Plot a value against the layer, one line for each run."""
    for run, style, label in zip(runs, styles(runs), legend_labels(runs), strict=True):
        layers = list(run.layers)
        axes.plot(layers, [number_or_nan(run.layers[layer].values[name]) for layer in layers], label=label, **style)
    show_at_least(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (0: first block)")


def figure_by_layer(runs: Sequence[ModelResult], name: str, label: str) -> Figure:
    """Draw a figure with one panel: a value against the layer."""
    longest = max(map(len, legend_labels(runs)))
    figure, ((axes,),) = panels(1, width=max(4.6, 3.2 + 0.075 * longest), height=3.0)  # the legend stands beside it
    plot_by_layer(axes, runs, name)
    axes.set_ylabel(label)
    axes.legend(title=legend_title(runs), loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def figure_by_head(runs: Sequence[ModelResult], quantities: Mapping[str, str], more: int = 0) -> Figure:
    """Draw one point for each head against the layer, coloured by its operator: a row for each run, a column for each
    quantity, and `more` empty columns."""
    figure, axes_RC = panels(len(quantities) + more, len(runs), width=3.1, height=2.3)
    axes_RC = axes_RC[:, : len(quantities)]
    present = dict.fromkeys(
        name for run in runs for each in run.layers.values() for name in each.words.get("operators", [])
    )
    for number, (row, run, label) in enumerate(zip(axes_RC, runs, title_labels(runs), strict=True)):
        for panel, (name, title) in zip(row, quantities.items(), strict=True):
            for place, operator in enumerate(present):
                points = [
                    (layer + 0.1 * (place - (len(present) - 1) / 2), value)
                    for layer, result in run.layers.items()
                    if name in result.series
                    for value, its_operator in zip(result.series[name], result.words["operators"], strict=True)
                    if its_operator == operator and np.isfinite(value)
                ]
                # `reshape` also gives two empty columns where a run has no head with this operator.
                x, y = np.array(points).reshape(-1, 2).T
                colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
                panel.scatter(x, y, s=22, color=colour, marker=marker, alpha=0.8, linewidth=0, label=operator)
            panel.set_xlim(min(run.layers) - 0.5, max(run.layers) + 0.5)
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.set_xlabel("layer (0: first block)" if number == len(runs) - 1 else "")
            panel.set_ylabel(title)
            panel.set_title(label)
    for column in axes_RC.T:  # one range for all runs, so that they can be compared
        lows, highs = zip(*(panel.get_ylim() for panel in column), strict=True)
        for panel in column:
            panel.set_ylim(min(lows), max(highs))
    handles, names = axes_RC[0][0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper center", ncols=min(5, max(1, len(names))), title="operator of the head"
    )
    return figure


def name_runs(axes: Any, runs: Sequence[ModelResult]) -> None:
    """Name runs along the horizontal axis; long labels take two lines, and many long labels are rotated.

    With more than three runs there is no room for the word "Laplacian", and only the axis title says what is counted.
    """
    shown = [re.sub(r"^([\d.]+)L\b", r"\1", label) for label in labels(runs)]
    shown = [label.replace(", ", "\n").replace(" (", "\n(") for label in shown]
    if len(runs) <= 3 and all("(" not in label for label in shown):
        shown = [label.replace(" Laplacian", "\nLaplacian").replace(", ", "\n") for label in long_labels(runs)]
    long = max(max(map(len, label.split("\n"))) for label in shown) > 9
    axes.set_xticks(range(len(runs)), shown, fontsize=7 if long else 9, rotation=90 if long and len(runs) > 3 else 0)
    axes.set_xlabel("Laplacian heads in a layer")


def plot_bars(axes: Any, runs: Sequence[ModelResult], values: Sequence[float]) -> None:
    """Draw one bar for each run, with its value above it."""
    for place, (value, style) in enumerate(zip(values, styles(runs), strict=True)):
        # `styles` gives a solid line to trained models only, so that bars of untrained ones are hatched.
        axes.bar(place, value, width=0.62, color=style["color"], hatch="//" if style["linestyle"] != "-" else None)
        if np.isfinite(value):
            axes.annotate(
                f"{value:.1f}", (place, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
            )
    name_runs(axes, runs)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
