"""One chart: lines with their points, drawn as files (SVG, PNG, PDF) or as a part of the page, and written as CSV.

A colour is a plan of heads, the same one in every chart of a page; a thin line is a run. As a file, a chart has its own
colours on white and a legend; in the page, its text and axes take the page's colours, light or dark, the legend is
outside, and `page.js` finds points and lines by the numbers in `data`.
"""

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lapcli.analysis.drawing import UNDATED, FigureFormat
from lapcli.runtime.tables import to_csv

#: Okabe and Ito's colours, which read on white and on black and for colour-blind readers; lines differ in their
#: markers and dashes too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a8a8a")
MARKERS = "osD^vPX"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
# Unusual values on purpose: `inline` replaces them as text, and no line or marker may have the same colour.
_TEXT, _LINES = "#101112", "#c0c1c2"  # in the page, replaced by the page's own colours
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    # Text stays text instead of outlines: smaller, and found by a search in the page.
    "svg.fonttype": "none",
    "svg.hashsalt": "lap",  # the same figure gives the same file
    "pdf.fonttype": 42,
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


@dataclass
class Line:
    """A line of a chart. `low` and `high` are the edges of its band, if any; `run` is empty for means over runs."""

    name: str  # in the legend and on hovering
    colour: str
    points: list[tuple[float, float]]
    run: str = ""
    plan: str = ""
    style: int = 0  # of markers and dashes
    is_thin: bool = False
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    n: list[int] = field(default_factory=list)  # number of seeds of each point of means
    hollow: list[tuple[float, float, float]] = field(default_factory=list)  # points that are not on the line, with ±
    in_legend: bool = True


@dataclass
class Chart:
    name: str  # of the files
    title: str
    caption: str
    x_label: str
    y_label: str
    lines: list[Line]
    x_ticks: list[float] | None = None  # None: whole numbers, chosen automatically
    y_at_least: tuple[float, float] | None = None  # values that the axis has to show, so that noise looks like noise
    legend_title: str = ""
    experiment: int = 0  # its number on the page
    x_names: dict[float, str] = field(default_factory=dict)  # of ticks that are not numbers

    def csv(self) -> str:
        """Return every point that is drawn, one a line."""
        header = ["line", "run", self.x_label, self.y_label, "low", "high", "seeds"]
        rows: list[list[Any]] = []
        for line in self.lines:
            for place, (x, y) in enumerate(line.points):
                low, high, n = (values[place] if values else None for values in (line.low, line.high, line.n))
                edges = [None if edge is None or math.isnan(edge) else edge for edge in (low, high)]
                rows.append([line.name, line.run, _whole(x), y, *edges, n])
            rows += [[line.name, line.run, x, y, y - spread, y + spread, None] for x, y, spread in line.hollow]
        return to_csv(header, rows)

    def file(self, form: str, figure_format: FigureFormat) -> bytes:
        """Return the chart as a file of its own, with a legend."""
        import matplotlib as mpl

        with mpl.rc_context(_STYLE):
            figure, _ = self._draw(figure_format.size or (4.8, 3.0), legend=True)
            stream = io.BytesIO()
            figure.savefig(stream, format=form, dpi=figure_format.dpi, metadata=UNDATED.get(form))
        return stream.getvalue()

    def inline(self, number: int) -> tuple[str, str]:
        """Return the chart as a part of a page, with unique ids, and the script's data as JSON."""
        import matplotlib as mpl

        with mpl.rc_context(_STYLE):
            figure, axes = self._draw((4.4, 2.9), legend=False, mark=f"d{number}")
            stream = io.StringIO()
            figure.savefig(stream, format="svg", dpi=72, facecolor="none", metadata={"Date": None, "Creator": None})
            height = figure.get_size_inches()[1] * 72
            # An SVG is written in points; extents are in pixels of the figure, from its lower edge upwards.
            scale = 72 / figure.dpi
            box = axes.get_window_extent()
            edges = [box.x0 * scale, height - box.y1 * scale, box.x1 * scale, height - box.y0 * scale]
        text = stream.getvalue()
        text = text[text.index("<svg") :]
        # Ids, and references to them, have to be unique among all drawings of the page.
        text = re.sub(r'\bid="(?!d\d)', f'id="d{number}-', text)
        text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>d{number}-", text)
        # Without width and height the drawing takes the size that the page's style gives it.
        text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
        text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = text.replace(_TEXT, "currentColor").replace(_LINES, "var(--line)")
        data = {
            "box": [round(edge, 2) for edge in edges],
            "x": list(axes.get_xlim()),
            "y": list(axes.get_ylim()),
            "xName": self.x_label,
            "yName": self.y_label,
            "lines": [
                {
                    "id": f"d{number}-line-{place}",
                    "name": line.name,
                    "run": line.run,
                    "plan": line.plan,
                    "colour": line.colour,
                    # Five digits, because a page holds the points of every curve; the CSV beside it has all digits.
                    "points": [[_whole(x), float(f"{y:.5g}")] for x, y in line.points]
                    + [[x, float(f"{y:.5g}")] for x, y, _ in line.hollow],
                }
                for place, line in enumerate(self.lines)
            ],
        }
        return text, json.dumps(data)

    def _draw(self, size: tuple[float, float], *, legend: bool, mark: str = "") -> tuple[Any, Any]:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        seen: set[str] = set()
        for place, line in enumerate(self.lines):
            gid = f"{mark}-line-{place}" if mark else None
            name = _safe(line.name) if line.in_legend and line.name not in seen else None
            seen.add(line.name)
            x, y = [x for x, _ in line.points], [y for _, y in line.points]
            options: dict[str, Any] = {"color": line.colour, "gid": gid, "label": name}
            if line.is_thin:
                dash = DASHES[line.style % len(DASHES)]
                is_dot = len(x) == 1
                axes.plot(x, y, linewidth=1.0, alpha=0.9, linestyle=dash, marker="o" if is_dot else None, **options)
            else:
                marker = MARKERS[line.style % len(MARKERS)]
                axes.plot(x, y, marker=marker, **options)
                if line.low:
                    axes.fill_between(x, line.low, line.high, color=line.colour, alpha=0.18, linewidth=0)
                    # A band has no width at a point without neighbours, such as a lone baseline.
                    spreads = [high - mean for high, mean in zip(line.high, y, strict=True)]
                    axes.errorbar(x, y, spreads, fmt="none", ecolor=line.colour, elinewidth=1.0, capsize=2)
                for hx, hy, spread in line.hollow:
                    style: dict[str, Any] = {"color": line.colour, "marker": marker, "markerfacecolor": "none"}
                    axes.errorbar(hx, hy, spread or None, capsize=2, **style)
        axes.set_xlabel(_safe(self.x_label))
        axes.set_ylabel(_safe(self.y_label))
        if self.x_ticks is not None:
            names = [self.x_names.get(number, f"{number:.3g}") for number in self.x_ticks]
            axes.set_xticks(self.x_ticks, names)
            for number, tick in zip(self.x_ticks, axes.get_xticklabels(), strict=True):
                if number in self.x_names:
                    tick.set(rotation=35, ha="right", rotation_mode="anchor", fontsize=7)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if self.y_at_least is not None:
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, self.y_at_least[0]), max(high, self.y_at_least[1]))
        if legend and len(seen) > 1:
            figure.legend(title=_safe(self.legend_title) or None, loc="outside right upper")
        # The constrained layout is computed here; before it, the extent of the axes is not final.
        figure.canvas.draw()
        return figure, axes


def _whole(x: float) -> float | int:
    return int(x) if float(x).is_integer() else x


def _safe(text: str) -> str:
    """Escape dollar signs, between which matplotlib would read mathematics."""
    return text.replace("$", r"\$")


def plan_colours(labels: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return a colour and a dash for each plan, in their order; when the colours run out, the dashes differ."""
    return {label: (COLOURS[n % len(COLOURS)], n // len(COLOURS)) for n, label in enumerate(labels)}
