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


def _by_layer(axes: Any, runs: Sequence["Measured"], name: str) -> None:
    """A value against the layer, a line a run."""
    for run, style, label in zip(runs, _styles(runs), labels(runs), strict=True):
        layers = list(run.layers)
        axes.plot(layers, [_number(run.layers[layer].values[name]) for layer in layers], label=label, **style)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (0: first block)")


def _name_runs(axes: Any, runs: Sequence["Measured"]) -> None:
    """Runs along the horizontal axis; long labels go on two lines and, where many, upright."""
    shown = [label.replace(", ", "\n").replace(" (", "\n(") for label in labels(runs)]
    long = max(max(map(len, label.split("\n"))) for label in shown) > 6
    axes.set_xticks(range(len(runs)), shown, fontsize=7 if long else 9, rotation=90 if long and len(runs) > 3 else 0)
    axes.set_xlabel("Laplacian heads in a layer")


def _bars(axes: Any, runs: Sequence["Measured"], values: Sequence[float], form: str = "{:.1f}") -> None:
    """One value a run."""
    for place, (value, style) in enumerate(zip(values, _styles(runs), strict=True)):
        axes.bar(place, value, width=0.62, color=style["color"], hatch="//" if style["linestyle"] != "-" else None)
        if np.isfinite(value):
            axes.annotate(
                form.format(value), (place, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
            )
    _name_runs(axes, runs)
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
        if len(runs) <= 3:  # more bands than that hide each other
            lowest = np.maximum(mean - std, mean * 1e-2)
            left.fill_between(rank, lowest, mean + std, color=style["color"], alpha=0.15, linewidth=0)
    left.set_yscale("log")
    left.set_xscale("log")
    left.set_xlabel("rank of the eigenvalue")
    band = "\n(band: one standard deviation)" if len(runs) <= 3 else ""
    left.set_ylabel(f"eigenvalue, mean over sequences{band}")
    left.legend(title=legend_title(runs))
    if all(len(run.layers) == 1 for run in runs):
        _bars(right, runs, [_number(next(iter(run.layers.values())).values["k_0.99"]) for run in runs])
        right.set_ylabel("components for 99% of the variance")
    else:
        _by_layer(right, runs, "k_0.99")
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
        axes.bar(range(len(runs)), values, 0.66, bottom=base, color=colour, hatch=hatch, edgecolor="white", label=name)
        for place, value in enumerate(values):
            if value > 0.06:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9}
                text = f"{value:.0%}"
                axes.text(place, base[place] + value / 2, text, ha="center", va="center", fontsize=8, bbox=box)
        base = base + values
    _name_runs(axes, runs)
    axes.set_ylim(0, 1)
    axes.grid(axis="x", visible=False)


def _lines(name: str, label: str) -> Callable[["Analysis"], Figure]:
    def drawn(analysis: "Analysis") -> Figure:
        figure, ((axes,),) = _panels(1, width=4.6, height=3.0)
        _by_layer(axes, analysis.runs, name)
        axes.set_ylabel(label)
        axes.legend(title=legend_title(analysis.runs), loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure

    return drawn


NC = {
    "nc1": "NC1: within over between",
    "nc2_equinorm": "NC2: equinorm",
    "nc2_equiangular": "NC2: equiangular",
    "nc3": "NC3: self-duality",
    "nc4": "NC4: nearest mean disagrees",
}
_OF = {
    "centred": ("class means, centred", COLOURS[0], "o", "-"),
    "as_printed": ("class means, as printed", COLOURS[1], "s", "--"),
    "classifier": ("classifier rows", COLOURS[2], "D", "-."),
}


def _collapse(analysis: "Analysis") -> Figure:
    """The paper's four panels and NC1: against the number of heads, or against the layer if several were asked for."""
    runs = analysis.runs
    figure, panels = _panels(3, 2, width=3.2, height=2.6)
    axes = panels.reshape(-1)
    by_layer = any(len(run.layers) > 1 for run in runs)
    for panel, (name, title) in zip(axes, NC.items(), strict=False):
        split = name.startswith("nc2")
        if by_layer:
            _by_layer(panel, runs, f"{name}_centred" if split else name)
        else:
            kinds = _OF.items() if split else {"": ("", "#333333", "o", "-")}.items()
            for suffix, (label, colour, marker, line) in kinds:
                key = f"{name}_{suffix}" if split else name
                values = [_number(next(iter(run.layers.values())).values[key]) for run in runs]
                panel.plot(range(len(runs)), values, color=colour, marker=marker, linestyle=line, label=label)
            _name_runs(panel, runs)
        panel.set_title(title + (", centred means" if split and by_layer else ""))
        panel.set_ylim(0, max(panel.get_ylim()[1], 1e-6) * 1.08)
    axes[0].set_ylabel("smaller is closer to collapse")
    axes[3].set_ylabel("smaller is closer to collapse")
    handles, names = (axes[0] if by_layer else axes[1]).get_legend_handles_labels()
    axes[5].axis("off")
    axes[5].legend(handles, names, loc="center", title=legend_title(runs) if by_layer else None)
    return figure


def _scatter(axes: Any, found: Any, order: list[int], names: Sequence[str]) -> None:
    """Points in the colour and marker of their class."""
    places, classes = found.points["place"], found.points["class"]
    for number, label in enumerate(order):
        own = places[classes == label]
        axes.scatter(
            own[:, 0],
            own[:, 1],
            s=9,
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            alpha=0.6,
            linewidth=0,
            label=names[label],
            rasterized=True,
        )


def _class_order(runs: Sequence["Measured"]) -> list[int]:
    seen = [found.points["class"] for run in runs for found in run.layers.values() if "class" in found.points]
    return sorted(int(label) for label in np.unique(np.concatenate(seen))) if seen else []


def _pca(analysis: "Analysis") -> Figure | None:
    """A row a run, a column a layer."""
    runs, order = analysis.runs, _class_order(analysis.runs)
    if not order:
        return None
    columns = max(len(run.layers) for run in runs)
    figure, panels = _panels(columns, len(runs), width=2.3, height=2.2)
    for row, run, label in zip(panels, runs, labels(runs), strict=True):
        for panel, (layer, found) in zip(row, run.layers.items(), strict=False):
            if "place" in found.points:
                _scatter(panel, found, order, run.class_names)
                first, second = (_number(found.values[f"variance_share_{n}"]) for n in (1, 2))
                panel.set_xlabel(f"component 1 ({first:.0%})")
                panel.set_ylabel(f"component 2 ({second:.0%})")
            panel.set_title(f"{label}, layer {layer}")
            panel.set_xticks([])
            panel.set_yticks([])
    _class_legend(figure, panels[0][0], "next token" if runs[0].subject.kind == "language" else "class")
    return figure


def _class_legend(figure: Figure, panel: Any, title: str) -> None:
    handles, names = panel.get_legend_handles_labels()
    legend = figure.legend(handles, names, loc="outside right center", title=title, markerscale=1.8)
    for handle in legend.legend_handles:
        handle.set_alpha(1.0)


def _simplex(analysis: "Analysis") -> Figure | None:
    """A panel a run, with the classifier's three directions as arrows."""
    runs, order = analysis.runs, _class_order(analysis.runs)
    if not order:
        return None
    columns = min(3, len(runs))
    figure, panels = _panels(columns, -(-len(runs) // columns), width=2.6, height=2.6)
    flat = panels.reshape(-1)
    for panel, run, label in zip(flat, runs, labels(runs), strict=False):
        found = run.layers[max(run.layers)]
        panel.set_title(label)
        panel.set_aspect("equal")
        if "place" not in found.points:
            continue
        _scatter(panel, found, order, run.class_names)
        reach = float(np.quantile(np.linalg.norm(found.points["place"], axis=1), 0.98))
        corners = np.stack([found.series["corner_x"], found.series["corner_y"]], axis=1)
        corners = corners / np.maximum(np.linalg.norm(corners, axis=1), 1e-300)[:, None] * reach
        for corner, label_ in zip(corners, found.series["corner_class"], strict=True):
            panel.annotate("", corner, (0, 0), arrowprops={"arrowstyle": "-|>", "color": "#222222", "linewidth": 1.2})
            panel.annotate(
                run.class_names[int(label_)],
                corner * 1.12,
                ha="center",
                va="center",
                fontsize=9,
                fontweight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.8},
            )
        edge = 1.3 * reach
        panel.set_xlim(-edge, edge)
        panel.set_ylim(-edge, edge)
        panel.set_xlabel("first axis of the plane")
        panel.set_ylabel("second axis of the plane")
    for panel in flat[len(runs) :]:
        panel.axis("off")
    _class_legend(figure, flat[0], "class")
    return figure


UPDATES = {
    "cosine_with_mean": "cosine of the update\nwith the weighted mean",
    "cosine_towards_mean": "cosine of the update\nwith mean minus token",
    "variance_change": "relative change of the\nwithin-sequence variance",
}


def _updates(analysis: "Analysis") -> Figure:
    """A point a head, against the layer; a row a run."""
    runs = analysis.runs
    figure, panels = _panels(3, len(runs), width=3.1, height=2.1)
    changes = [found.series["variance_change"] for run in runs for found in run.layers.values()]
    largest = max((float(np.nanmax(np.abs(change))) for change in changes if np.isfinite(change).any()), default=1.0)
    for row, run, label in zip(panels, runs, labels(runs), strict=True):
        for panel, (name, title) in zip(row, UPDATES.items(), strict=True):
            for kind, colour, marker, shift in (
                ("attention", COLOURS[0], "o", -0.12),
                ("Laplacian", COLOURS[5], "^", 0.12),
            ):
                points = [
                    (layer + shift, value)
                    for layer, found in run.layers.items()
                    for value, laplacian in zip(found.series[name], found.series["is_laplacian"], strict=True)
                    if bool(laplacian) == (kind == "Laplacian") and np.isfinite(value)
                ]
                x, y = np.array(points).reshape(-1, 2).T
                panel.scatter(x, y, s=22, color=colour, marker=marker, alpha=0.8, linewidth=0, label=f"{kind} head")
            panel.axhline(0, color="#888888", linewidth=0.8)
            panel.set_xlim(min(run.layers) - 0.5, max(run.layers) + 0.5)
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.set_xlabel("layer (0: first block)" if row is panels[-1] else "")
            panel.set_ylabel(title)
            panel.set_title(label)
            if name != "variance_change":
                panel.set_ylim(-1.05, 1.05)
            else:  # one scale for all runs; a head that multiplies the variance would hide the others
                if largest > 2:
                    panel.set_yscale("symlog", linthresh=0.1)
                panel.set_ylim(-1.15 * max(largest, 1e-12), 1.15 * max(largest, 1e-12))
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2)
    return figure


def _features(analysis: "Analysis") -> Figure | None:
    """A row an image: the image, then a column a run (and a layer, if several were asked for)."""
    runs = analysis.runs
    columns = [
        (f"{label}" + (f", layer {layer}" if len(run.layers) > 1 else ""), found.pictures)
        for run, label in zip(runs, labels(runs), strict=True)
        for layer, found in run.layers.items()
    ]
    count = len(columns[0][1])
    if not count:
        return None
    figure, panels = _panels(1 + len(columns), count, width=1.9, height=1.9)
    for number, row in enumerate(panels):
        first = columns[0][1][number]
        row[0].imshow(first.picture, interpolation="nearest")
        row[0].set_ylabel(first.name if len(first.name) <= 24 else "..." + first.name[-21:], fontsize=7)
        for panel, (title, maps) in zip(row[1:], columns, strict=True):
            shown = maps[number]
            extent = (0, shown.picture.shape[1], shown.picture.shape[0], 0)
            if analysis.settings.overlay:
                panel.imshow(shown.picture, extent=extent)
            panel.imshow(
                shown.colours, extent=extent, interpolation="nearest", alpha=0.6 if analysis.settings.overlay else 1.0
            )
            panel.set_title(title if number == 0 else "")
        row[0].set_title("image" if number == 0 else "")
        for panel in row:
            panel.set_xticks([])
            panel.set_yticks([])
            panel.grid(visible=False)
            panel.spines[:].set_visible(False)
    return figure


_DRAW: dict[str, Callable[["Analysis"], Figure | None]] = {
    "spectrum": _spectrum,
    "anova": _anova,
    "cossim": _lines("cosine_similarity", "cosine similarity of two tokens,\nmean over pairs and sequences"),
    "snr": _lines("snr", "length of the mean token\nover the spread of the tokens"),
    "collapse": _collapse,
    "simplex": _simplex,
    "pca": _pca,
    "updates": _updates,
    "features": _features,
}
