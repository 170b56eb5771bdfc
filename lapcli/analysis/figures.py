"""The figures of the analyses, in the paper's arrangement: one for each measurement, with a line or panel a run.

Runs are labelled by their number of Laplacian heads (`3L`) and ordered by it. Colours are steps of one scale that is
monotonic in brightness, and lines differ in their markers too: they can be told apart in print and by the colour-blind.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from lapcli.analysis.analyze import Analysis, Measured

MARKERS = "osD^vP*Xph"
LINES = ("-", "--", "-.", ":")
#: Okabe and Ito's colours, for classes and shares, which have no order.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#7F3C8D")
STYLE = {
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
    "svg.hashsalt": "lap",  # the same picture, the same file
    "svg.fonttype": "none",
}


def draw(analysis: "Analysis", folder: Path) -> list[Path]:
    """PNG and SVG; nothing is drawn where there is nothing to show."""
    with mpl.rc_context(STYLE):
        figure = _DRAW[analysis.what](analysis)
        if figure is None:
            return []
        paths = [folder / f"{analysis.what}.{form}" for form in ("png", "svg")]
        for path in paths:
            options: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 160}
            figure.savefig(path, bbox_inches="tight", **options)
    return paths


def labels(runs: Sequence["Measured"]) -> list[str]:
    """`3L`, with the name where two runs would read the same."""
    plain = []
    for run in runs:
        counts = run.plan.per_layer
        text = f"{counts[0]}L" if len(set(counts)) == 1 else f"{run.plan.total / len(counts):.1f}L on average"
        plain.append(text if run.subject.weights != "untrained" else f"{text}, untrained")
    return [
        text if plain.count(text) == 1 else f"{text} ({run.subject.name})"
        for text, run in zip(plain, runs, strict=True)
    ]


def legend_title(runs: Sequence["Measured"]) -> str:
    heads = {run.plan.heads for run in runs}
    return f"Laplacian heads\n(of {heads.pop()} in a layer)" if len(heads) == 1 else "Laplacian heads in a layer"


def _styles(runs: Sequence["Measured"]) -> list[dict[str, Any]]:
    trained = [run for run in runs if run.subject.weights != "untrained"]
    steps = np.linspace(0.0, 0.82, max(len(trained), 2))
    styles: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        if run.subject.weights == "untrained":
            styles.append({"color": "#888888", "linestyle": LINES[index % 3 + 1], "marker": MARKERS[index % 10]})
        else:
            place = steps[trained.index(run)]
            styles.append({"color": mpl.colormaps["viridis"](place), "linestyle": "-", "marker": MARKERS[index % 10]})
    return styles


def _number(value: float | int | None) -> float:
    return float("nan") if value is None else float(value)


def _panels(columns: int, rows: int = 1, width: float = 3.6, height: float = 2.9) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _by_layer(axes: Any, runs: Sequence["Measured"], name: str, spread: str | None = None) -> None:
    """A value against the layer, a line a run."""
    for run, style, label in zip(runs, _styles(runs), labels(runs), strict=True):
        layers = list(run.layers)
        values = np.array([_number(run.layers[layer].values[name]) for layer in layers])
        axes.plot(layers, values, label=label, **style)
        if spread:
            std = np.array([_number(run.layers[layer].values[spread]) for layer in layers])
            axes.fill_between(layers, values - std, values + std, color=style["color"], alpha=0.12, linewidth=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (0: first block)")


def _bars(axes: Any, runs: Sequence["Measured"], values: Sequence[float], form: str = "{:.1f}") -> None:
    """One value a run."""
    for place, (value, style) in enumerate(zip(values, _styles(runs), strict=True)):
        axes.bar(place, value, width=0.62, color=style["color"], hatch="//" if style["linestyle"] != "-" else None)
        if np.isfinite(value):
            axes.annotate(
                form.format(value), (place, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set_xticks(range(len(runs)), labels(runs))
    if max(map(len, labels(runs))) > 6:
        axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("Laplacian heads in a layer")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)


def _spectrum(analysis: "Analysis") -> Figure:
    runs = analysis.runs
    figure, ((left, right),) = _panels(2)
    for run, style, label in zip(runs, _styles(runs), labels(runs), strict=True):
        found = run.layers[max(run.layers)]
        mean, std = found.series["eigenvalue_mean"], found.series["eigenvalue_std"]
        shown = mean > 1e-12 * max(mean[0], 1e-300)  # centring leaves one eigenvalue of rounding
        rank, mean, std = np.arange(1, len(mean) + 1)[shown], mean[shown], std[shown]
        left.plot(rank, mean, label=label, color=style["color"], linestyle=style["linestyle"])
        lowest = np.maximum(mean - std, mean * 1e-2)
        left.fill_between(rank, lowest, mean + std, color=style["color"], alpha=0.15, linewidth=0)
    left.set_yscale("log")
    left.set_xscale("log")
    left.set_xlabel("rank of the eigenvalue")
    left.set_ylabel("eigenvalue, mean over sequences\n(band: one standard deviation)")
    left.legend(title=legend_title(runs))
    if all(len(run.layers) == 1 for run in runs):
        _bars(right, runs, [_number(next(iter(run.layers.values())).values["k_0.99"]) for run in runs])
        right.set_ylabel("components for 99% of the variance")
    else:
        _by_layer(right, runs, "k_0.99", "k_0.99_std")
        right.set_ylabel("components for 99% of the variance")
    return figure


PARTS = {
    "between_class": ("between classes", COLOURS[0], None),
    "within_class": ("within class", COLOURS[1], "//"),
    "within_sequence": ("within sequence", COLOURS[2], ".."),
}


def _anova(analysis: "Analysis") -> Figure:
    runs = analysis.runs
    first = next(iter(runs[0].layers.values())).values
    parts = [name for name in PARTS if f"{name}_share" in first]
    if any(len(run.layers) > 1 for run in runs):
        figure, (axes,) = _panels(len(parts), width=3.0)
        for part, panel in zip(parts, axes, strict=True):
            _by_layer(panel, runs, f"{part}_share")
            panel.set_title(PARTS[part][0])
            panel.set_ylim(0, 1)
        axes[0].set_ylabel("share of the variance")
        axes[-1].legend(title=legend_title(runs))
        return figure
    weightings = {"": "every class alike", "_by_example": "weighted by token"}
    shown = weightings if "within_sequence" not in parts else {"": ""}
    figure, (axes,) = _panels(len(shown), width=max(3.4, 1.2 + 0.7 * len(runs)))
    for panel, (suffix, title) in zip(axes, shown.items(), strict=True):
        _stacked(panel, runs, parts, suffix)
        panel.set_title(title)
    axes[0].set_ylabel("share of the variance")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(parts))
    return figure


def _stacked(axes: Any, runs: Sequence["Measured"], parts: Sequence[str], suffix: str) -> None:
    base = np.zeros(len(runs))
    for part in parts:
        name, colour, hatch = PARTS[part]
        values = np.array([_number(next(iter(r.layers.values())).values[f"{part}_share{suffix}"]) for r in runs])
        values = np.nan_to_num(values)
        axes.bar(
            range(len(runs)), values, 0.66, bottom=base, color=colour, hatch=hatch, edgecolor="white", label=name
        )
        for place, value in enumerate(values):
            if value > 0.06:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9}
                text = f"{value:.0%}"
                axes.text(place, base[place] + value / 2, text, ha="center", va="center", fontsize=8, bbox=box)
        base = base + values
    axes.set_xticks(range(len(runs)), labels(runs))
    if max(map(len, labels(runs))) > 6:
        axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("Laplacian heads in a layer")
    axes.set_ylim(0, 1)
    axes.grid(axis="x", visible=False)


def _lines(name: str, label: str) -> Callable[["Analysis"], Figure]:
    def drawn(analysis: "Analysis") -> Figure:
        figure, ((axes,),) = _panels(1, width=4.6, height=3.0)
        _by_layer(axes, analysis.runs, name, f"{name}_std")
        axes.set_ylabel(label)
        axes.legend(title=legend_title(analysis.runs), loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure

    return drawn


_DRAW: dict[str, Callable[["Analysis"], Figure | None]] = {
    "spectrum": _spectrum,
    "anova": _anova,
    "cossim": _lines("cosine_similarity", "cosine similarity of two tokens,\nmean over pairs and sequences"),
    "snr": _lines("snr", "length of the mean token\nover the spread of the tokens"),
}
