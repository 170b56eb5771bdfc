"""Shared parts of the measurements' figures: style, lines of runs with their labels, common panels, and saving.

Runs are labelled by their number of Laplacian heads, `3L`, and ordered by it. Runs that differ only in their seeds
share a line or bar, with the standard deviation over seeds as error bars. Colours are steps of one scale that is
monotonic in brightness, and lines also have different markers, for print and colour-blind
readers. matplotlib is imported inside functions, because the declarations of measurements import this
module.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
#: Okabe and Ito's colours, for unordered classes and fractions.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#7F3C8D")


FORMS = ("png", "svg", "pdf")
#: Metadata without a date, so that the same figure gives the same file.
UNDATED: dict[str, Any] = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}


def save_figure(analysis: Analysis, folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG and return the paths; an empty list if there is nothing to show."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = analysis.measurement.draw(analysis)
        if figure is None:
            return []
        paths = [folder / f"{analysis.what}.{form}" for form in FORMS[:2]]
        for path, form in zip(paths, FORMS[:2], strict=True):
            content = io.BytesIO()
            figure.savefig(content, format=form, bbox_inches="tight", dpi=160, metadata=UNDATED.get(form))
            write_bytes(path, content.getvalue())
    return paths


def panels(columns: int, rows: int = 1, width: float = 3.6, height: float = 2.9) -> tuple[Figure, np.ndarray]:
    """Create a figure with rows x columns axes; `width` and `height` are per panel."""
    from matplotlib.figure import Figure

    # Not pyplot, which keeps every figure alive until it is closed and chooses a backend for the whole process.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


_MOST_NAMED = 3  # operators in a label; more would make the legend wider than its figure
_LONGEST = 30  # characters of a run's name in a label


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
    names = [run.model.name for run in runs]
    return [text if plain.count(text) == 1 else f"{text} ({name})" for text, name in zip(plain, names, strict=True)]


def titles(runs: Sequence[ModelResult]) -> list[str]:
    """Return the labels for narrow panels: run names are shortened, on a separate line."""
    return [_shown(label).replace(" (", "\n(") for label in labels(runs)]


def _shown(label: str) -> str:
    text, bracket, name = label.partition(" (")
    name = name if len(name) <= _LONGEST else f"{name[:14]}...{name[-14:]}"
    return (text + bracket + name).replace("$", r"\$")  # else matplotlib reads mathematics


@dataclass
class Line:
    """The runs that share one line or bar, because they differ only in their seeds."""

    label: str
    runs: list[ModelResult]
    style: dict[str, Any]  # colour, line and marker; untrained models are grey

    def over_seeds(self, value: Callable[[ModelResult], Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the mean and the standard deviation over the seeds; None for one seed."""
        values = np.array([value(run) for run in self.runs], dtype=float)  # None is NaN
        return values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else None

    def at_first_layer(self, name: str) -> tuple[float, float]:
        """Return the mean and deviation of a value at the first measured layer; the latter is NaN for one seed."""
        mean, std = self.over_seeds(lambda run: next(iter(run.layers.values())).values[name])
        return float(mean), float("nan") if std is None else float(std)


def lines_of(runs: Sequence[ModelResult]) -> list[Line]:
    import matplotlib as mpl

    alike: dict[Any, list[ModelResult]] = {}
    for run in runs:
        model = run.model
        alike.setdefault((model.recipe or model.name, model.weights, tuple(run.layers)), []).append(run)
    groups = list(alike.values())
    trained = [group for group in groups if group[0].model.weights != "untrained"]
    steps = iter(np.linspace(0.0, 0.82, max(len(trained), 2)))  # the bright end of viridis is hard to see on white
    lines = []
    for place, (group, label) in enumerate(zip(groups, labels([group[0] for group in groups]), strict=True)):
        style = {"color": "#888888", "linestyle": ("--", "-.", ":")[place % 3], "marker": MARKERS[place % 10]}
        if group in trained:
            style |= {"color": mpl.colormaps["viridis"](next(steps)), "linestyle": "-"}
        seeds = f", {len(group)} seeds" if len(group) > 1 else ""
        lines.append(Line(_shown(label) + seeds, group, style))
    return lines


def is_one_point(runs: Sequence[ModelResult]) -> bool:
    """Return whether a figure would be a single bar or point, which the table shows as well."""
    return len(lines_of(runs)) == 1 and len(runs[0].layers) == 1


def legend_title(runs: Sequence[ModelResult]) -> str:
    heads = {run.plan.heads for run in runs}
    what = "Heads by operator" if not all(run.plan.is_laplacian for run in runs) else "Laplacian heads (L)"
    return f"{what}\nof {heads.pop()} in a layer" if len(heads) == 1 else f"{what} in a layer"


def number_or_nan(value: float | int | None) -> float:
    return float("nan") if value is None else float(value)


def plot_by_layer(axes: Any, runs: Sequence[ModelResult], name: str) -> None:
    """Plot a value against the layer, one line for each recipe."""
    for line in lines_of(runs):
        mean, std = line.over_seeds(lambda run: [result.values[name] for result in run.layers.values()])
        axes.errorbar(list(line.runs[0].layers), mean, yerr=std, capsize=3, label=line.label, **line.style)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (0: first block)")


def figure_by_layer(runs: Sequence[ModelResult], name: str, label: str) -> Figure:
    """Draw a figure with one panel: a value against the layer."""
    figure, ((axes,),) = panels(1, width=5.6, height=3.0)
    plot_by_layer(axes, runs, name)
    axes.set_ylabel(label)
    axes.legend(title=legend_title(runs), loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def figure_by_head(runs: Sequence[ModelResult], quantities: Mapping[str, str]) -> Figure:
    """Draw one point for each head against the layer, coloured by its operator: a row for each run, a column for each
    quantity."""
    figure, axes_RC = panels(len(quantities), len(runs), width=3.1, height=2.3)
    present = dict.fromkeys(
        name for run in runs for each in run.layers.values() for name in each.words.get("operators", [])
    )
    for number, (row, run, label) in enumerate(zip(axes_RC, runs, titles(runs), strict=True)):
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
            if max(map(abs, (*lows, *highs))) > 4:  # one far value would hide all others
                panel.set_yscale("symlog", linthresh=0.1)
            if min(lows) < 0 < max(highs):
                panel.axhline(0, color="#888888", linewidth=0.8)
            panel.set_ylim(min(lows), max(highs))
    handles, names = axes_RC[0][0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper center", ncols=min(5, max(1, len(names))), title="operator of the head"
    )
    return figure


def name_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Name lines along the horizontal axis; many long labels are rotated."""
    shown = [line.label.replace(", ", "\n").replace(" (", "\n(") for line in lines]
    long = max(max(map(len, label.split("\n"))) for label in shown) > 9
    axes.set_xticks(range(len(lines)), shown, fontsize=7 if long else 9, rotation=90 if long and len(lines) > 3 else 0)
    axes.set_xlabel("Laplacian heads (L) in a layer")


def plot_bars(axes: Any, runs: Sequence[ModelResult], name: str) -> None:
    """Draw one bar for each recipe, with its value above it."""
    lines = lines_of(runs)
    for place, line in enumerate(lines):
        mean, std = line.at_first_layer(name)
        # Only trained models have a solid line; bars of untrained ones are hatched.
        hatch = "//" if line.style["linestyle"] != "-" else None
        axes.bar(place, mean, yerr=std, width=0.62, color=line.style["color"], hatch=hatch, capsize=4)
        if np.isfinite(mean):
            top = mean + np.nan_to_num(std)
            axes.text(place, top, f"{mean:.1f}", ha="center", va="bottom", fontsize=8)
    name_lines(axes, lines)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
