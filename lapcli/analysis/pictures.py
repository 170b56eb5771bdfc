"""Figures that show tokens themselves: as points on a plane, and as the colours of an image's patches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from lapcli.analysis.figure_parts import COLOURS, MARKERS, labels, number_or_nan, panels_of

if TYPE_CHECKING:
    from lapcli.analysis.analyze import Analysis, Measured


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


def pca(analysis: "Analysis") -> Figure | None:
    """A row a run, a column a layer."""
    runs, order = analysis.runs, _class_order(analysis.runs)
    if not order:
        return None
    columns = max(len(run.layers) for run in runs)
    figure, panels = panels_of(columns, len(runs), width=2.3, height=2.2)
    for row, run, label in zip(panels, runs, labels(runs), strict=True):
        for panel, (layer, found) in zip(row, run.layers.items(), strict=False):
            if "place" in found.points:
                _scatter(panel, found, order, run.class_names)
                first, second = (number_or_nan(found.values[f"variance_share_{n}"]) for n in (1, 2))
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
        if handle is not None:
            handle.set_alpha(1.0)


def simplex(analysis: "Analysis") -> Figure | None:
    """A panel a run, with the classifier's three directions as arrows."""
    runs, order = analysis.runs, _class_order(analysis.runs)
    if not order:
        return None
    columns = min(3, len(runs))
    figure, panels = panels_of(columns, -(-len(runs) // columns), width=2.6, height=2.6)
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


def features(analysis: "Analysis") -> Figure | None:
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
    figure, panels = panels_of(1 + len(columns), count, width=1.9, height=1.9)
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
