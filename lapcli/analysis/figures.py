"""The figures of the analyses, in the paper's arrangement: one for each measurement, with a line or panel a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from lapcli.analysis import pictures
from lapcli.analysis.figure_parts import COLOURS, labels, legend_title, number_or_nan, panels_of, styles

if TYPE_CHECKING:
    from lapcli.analysis.analyze import Analysis, Measured

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


def _by_layer(axes: Any, runs: Sequence["Measured"], name: str) -> None:
    """A value against the layer, a line a run."""
    for run, style, label in zip(runs, styles(runs), labels(runs), strict=True):
        layers = list(run.layers)
        axes.plot(layers, [number_or_nan(run.layers[layer].values[name]) for layer in layers], label=label, **style)
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
    for place, (value, style) in enumerate(zip(values, styles(runs), strict=True)):
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
    figure, ((left, right),) = panels_of(2)
    for run, style, label in zip(runs, styles(runs), labels(runs), strict=True):
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
        _bars(right, runs, [number_or_nan(next(iter(run.layers.values())).values["k_0.99"]) for run in runs])
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
        figure, (axes,) = panels_of(len(parts), width=3.0)
        for part, panel in zip(parts, axes, strict=True):
            _by_layer(panel, runs, f"{part}_share")
            panel.set_title(PARTS[part][0])
            panel.set_ylim(0, 1)
        axes[0].set_ylabel("share of the variance")
        axes[-1].legend(title=legend_title(runs))
        return figure
    weightings = {"": "every class alike", "_by_example": "weighted by token"}
    shown = weightings if "within_sequence" not in parts else {"": ""}
    figure, (axes,) = panels_of(len(shown), width=max(3.4, 1.2 + 0.7 * len(runs)))
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
        values = np.array([number_or_nan(next(iter(r.layers.values())).values[f"{part}_share{suffix}"]) for r in runs])
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
        figure, ((axes,),) = panels_of(1, width=4.6, height=3.0)
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
    figure, panels = panels_of(3, 2, width=3.2, height=2.6)
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
                values = [number_or_nan(next(iter(run.layers.values())).values[key]) for run in runs]
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


UPDATES = {
    "cosine_with_mean": "cosine of the update\nwith the weighted mean",
    "cosine_towards_mean": "cosine of the update\nwith mean minus token",
    "variance_change": "relative change of the\nwithin-sequence variance",
}


def _updates(analysis: "Analysis") -> Figure:
    """A point a head, against the layer; a row a run."""
    runs = analysis.runs
    figure, panels = panels_of(3, len(runs), width=3.1, height=2.1)
    changes = [found.series["variance_change"] for run in runs for found in run.layers.values()]
    largest = max((float(np.nanmax(np.abs(change))) for change in changes if np.isfinite(change).any()), default=1.0)
    for number, (row, run, label) in enumerate(zip(panels, runs, labels(runs), strict=True)):
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
            panel.set_xlabel("layer (0: first block)" if number == len(runs) - 1 else "")
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


_DRAW: dict[str, Callable[["Analysis"], Figure | None]] = {
    "spectrum": _spectrum,
    "anova": _anova,
    "cossim": _lines("cosine_similarity", "cosine similarity of two tokens,\nmean over pairs and sequences"),
    "snr": _lines("snr", "length of the mean token\nover the spread of the tokens"),
    "collapse": _collapse,
    "simplex": pictures.simplex,
    "pca": pictures.pca,
    "updates": _updates,
    "features": pictures.features,
}
