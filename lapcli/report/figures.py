"""The charts of a report: training and validation curves; scores and k_0.99 against the rows.

A chart is data. The page draws it with plotly, `write_files` with matplotlib as PNG, SVG and PDF, and its numbers as
CSV. Points over several seeds have error bars of one standard deviation; a chart with one point is omitted.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from lapcli.analysis.drawing import COLOURS, FORMS, MARKERS, STYLE, UNDATED
from lapcli.report.collect import Grid, RowKey, data_in_words, kind_in_words
from lapcli.report.paper import drop_path, families
from lapcli.report.statistics import summarise
from lapcli.report.tables import Column, column_of
from lapcli.runs import time_of
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_bytes, write_text
from lapcli.runtime.tables import to_csv
from lapcli.same_recipe import HEADS
from lapcli.training.metrics import read_metrics

_MOST_NAMED = 12  # runs in a legend; beyond it has one entry for each row
LONGEST = 60  # characters of a heading
POINTS = 200  # of a training curve; more are averaged over stretches of steps
_PLANS = ("#3b528b", "#21918c", "#5ec962", "#d9a400", "#e4572e", "#a8327d", "#440154", "#7f7f7f")


@dataclass
class Line:
    name: str
    colour: str
    x: list[Any]
    y: list[float]
    error: list[float] = field(default_factory=list)  # one deviation; empty: no bars
    n: list[int] = field(default_factory=list)  # seeds of each point
    group: str = ""  # the plan of a run's curve


@dataclass
class Chart:
    name: str  # of its files
    title: str
    caption: str
    x_label: str
    y_label: str
    lines: list[Line]

    @property
    def is_curve(self) -> bool:
        return any(line.group for line in self.lines)

    def csv(self) -> str:
        rows = [
            [line.name, x, y, line.error[i] if line.error else None, line.n[i] if line.n else None]
            for line in self.lines
            for i, (x, y) in enumerate(zip(line.x, line.y, strict=True))
        ]
        return to_csv(["line", self.x_label, self.y_label, "standard deviation", "seeds"], rows)

    def file(self, form: str) -> bytes:
        """Return the figure by matplotlib."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(6.4, 3.8), layout="constrained")
            axes = figure.subplots()
            seen: set[str] = set()
            for place, line in enumerate(self.lines):
                label = line.group or line.name
                style: dict[str, Any] = {"color": line.colour, "label": None if label in seen else label}
                seen.add(label)
                if self.is_curve:
                    axes.plot(line.x, line.y, linewidth=1.0, **style)
                else:
                    marker = MARKERS[place % len(MARKERS)]
                    axes.errorbar(line.x, line.y, yerr=line.error or None, marker=marker, capsize=3, **style)
            if all(isinstance(x, float) for line in self.lines for x in line.x) and not self.is_curve:
                axes.set_xticks(sorted({x for line in self.lines for x in line.x}))
            axes.set(title=self.title.replace("$", r"\$"), xlabel=self.x_label, ylabel=self.y_label)
            if len(seen) > 1:
                axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
            content = io.BytesIO()
            figure.savefig(content, format=form, dpi=160, metadata=UNDATED.get(form))
        return content.getvalue()

    def html(self) -> str:
        """Return the figure by plotly, which the page contains once: values at the pointer, zoom, lines to hide."""
        import plotly.graph_objects as go

        figure, seen = go.Figure(), set()
        by_plan = len(self.lines) > _MOST_NAMED and self.is_curve  # a longer legend would leave no room for the curves
        for line in self.lines:
            where = f"%{{y:.4g}} at %{{x}}{' (%{customdata} seeds)' if line.n else ''}"
            figure.add_scatter(
                x=line.x,
                y=line.y,
                error_y={"type": "data", "array": line.error, "thickness": 1.2} if line.error else None,
                name=line.group if by_plan else line.name,
                mode="lines" if self.is_curve else "lines+markers",
                line={"color": line.colour, "width": 1.4},
                legendgroup=line.group if by_plan else None,
                showlegend=not by_plan or line.group not in seen,
                hovertemplate=f"{where}<extra>{escape(line.name)}</extra>",
                customdata=line.n or None,
            )
            seen.add(line.group)
        one_by_one = {"tickvals": sorted({x for line in self.lines for x in line.x})} if self._has_ticks else {}
        figure.update_layout(
            height=380,
            margin={"l": 60, "r": 10, "t": 30, "b": 50},
            modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#888", "activecolor": "#0b57a4"},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            showlegend=len(self.lines) > 1,
            legend={"orientation": "h", "yanchor": "top", "y": -0.22, "font": {"size": 11}},
            hovermode="closest",
            xaxis={"title": {"text": self.x_label}, "gridcolor": "#8884", "zeroline": False, **one_by_one},
            yaxis={"title": {"text": self.y_label}, "gridcolor": "#8884", "zeroline": False},
            font={"family": "system-ui, sans-serif", "size": 12},
        )
        options = {"format": "svg", "filename": self.name}
        config = {"responsive": True, "displaylogo": False, "toImageButtonOptions": options}
        config["modeBarButtonsToRemove"] = ["select2d", "lasso2d", "autoScale2d"]
        return figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"chart-{self.name}", config=config)

    @property
    def _has_ticks(self) -> bool:
        return not self.is_curve and all(isinstance(x, float) for line in self.lines for x in line.x)


@dataclass
class Experiment:
    """Grids that differ only in the drop path; their charts are shown together."""

    number: int  # on the page, from 1
    title: str
    grids: list[Grid]
    charts: list[Chart] = field(default_factory=list)


def experiments_of(grids: Sequence[Grid]) -> list[Experiment]:
    """Return the experiments with their charts: first those that compare rows, most recently changed first."""

    def place(family: Sequence[Grid]) -> tuple[bool, float]:
        newest = max(time_of(run.run.info) for grid in family for run in grid.runs)
        return any(len(grid.rows) > 1 for grid in family), newest

    made = []
    for number, family in enumerate(sorted(families(grids), key=place, reverse=True), 1):
        experiment = Experiment(number, _heading(family), family)
        experiment.charts = list(_charts(experiment))
        made.append(experiment)
    return made


def _heading(family: Sequence[Grid]) -> str:
    """Return kind, data and the distinguishing keys of this family, in at most 60 characters."""
    first, (_, _, *differences) = family[0].first, f"{family[0].title} ·  · ".split(" · ")
    data = data_in_words(first).rstrip("/").rsplit("/", 1)[-1]  # of a folder its name
    parts = [kind_in_words(first), data, f"{len(family)} drop paths" if len(family) > 1 else " · ".join(differences)]
    title = " · ".join(part for part in parts if part.strip(" ·"))
    return title[:1].upper() + (title[1:] if len(title) <= LONGEST else f"{title[1 : LONGEST - 3]}...")


def _charts(experiment: Experiment) -> list[Chart]:
    family = experiment.grids
    name = re.sub(r"[^a-z0-9]+", "-", f"{experiment.number}-{experiment.title}".lower()).strip("-")[:50]
    made = []
    for grid in family:
        place = f"-dp{drop_path(grid)}" if len(family) > 1 else ""
        for metric in ("loss", *list(grid.first.run.recipe.metrics)[:2]):
            made.append(_curves(grid, metric, f"{name}-{metric}{place}".replace("_", "-"), place))
    found = list(dict.fromkeys(measure for grid in family for measure in grid.measures()))
    single = [each for each in found if "." not in each and not each.startswith("peak_")]
    scores = [each for each in single if not each.startswith("validation_")]
    components = [each for each in found if each == "spectrum.k_0.99"]
    made += [_by_rows(family, each, name) for each in (scores or single) + components]
    return [chart for chart in made if chart is not None]


def _curves(grid: Grid, metric: str, name: str, place: str) -> Chart | None:
    """Draw a line for each run in the colour of its row; training losses are averaged over intervals of steps."""
    unit, _ = grid.first.run.recipe.metrics.get(metric, ("", None))
    column = Column(metric, "training loss" if metric == "loss" else metric.replace("_", " "), unit)
    lines = []
    for number, (row, runs) in enumerate(grid.rows.items()):
        for run in runs.values():
            points = [
                (float(line["step"]), line[metric] * column.scale)
                for line in read_metrics(run.run.metrics)
                if isinstance(line.get(metric), float | int) and abs(line[metric]) < float("inf")
            ]
            points = _stretches(points) if metric == "loss" else points
            if points:
                x, y = map(list, zip(*points, strict=True))
                lines.append(Line(run.name, _PLANS[number % len(_PLANS)], x, y, group=row_name(grid, row)))
    if not lines or max(len(line.x) for line in lines) < 2:
        return None
    label = column.label + (" (%)" if unit == "fraction" else "")
    title = label[:1].upper() + label[1:] + (f", drop path {place[3:]}" if place else "")
    caption = f"A line for each of {len(lines)} runs, a colour for each row" + (
        "; points are means over stretches of steps." if metric == "loss" else "."
    )
    return Chart(name, title, caption, "step", label, lines)


def _stretches(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // POINTS) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    # At the last step of an interval, so that the curve ends at the last training step.
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def row_name(grid: Grid, row: RowKey) -> str:
    return f"{row.label} Laplacian" if grid.rows_by == (HEADS,) and row.heads is not None else row.label


def _by_rows(family: Sequence[Grid], measure: str, name: str) -> Chart | None:
    """Draw means against the rows, a line for each drop path."""
    lines: list[Line] = []
    column = next(column_of(measure, grid) for grid in family if grid.about(measure) is not None)
    is_number = all(re.fullmatch(r"[\d.e+-]+", row.label) for grid in family for row in grid.rows)
    for grid in family:
        found = {row: summarise(list(grid.values(row, measure).values())) for row in grid.rows}
        points = [(row, each) for row, each in found.items() if each is not None]
        if not points:
            continue
        x: list[Any] = [float(row.label) if is_number else row.label for row, _ in points]
        has_seeds = any(each.n > 1 for _, each in points)
        lines.append(
            Line(
                f"drop path {drop_path(grid)}",
                COLOURS[len(lines) % len(COLOURS)],
                x,
                [each.mean * column.scale for _, each in points],
                [(each.std or 0.0) * column.scale for _, each in points] if has_seeds else [],
                [each.n for _, each in points],
            )
        )
    if len({x for line in lines for x in line.x}) < 2:  # a single point shows no more than the table
        return None
    counts = [n for line in lines for n in line.n]
    seeds = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    caption = f"Means over {seeds} seeds; bars are one standard deviation." if max(counts) > 1 else "One seed, no bars."
    label = column.label
    file = re.sub(r"[^a-z0-9-]+", "-", f"{name}-{measure}-by-rows".lower())
    across = "Laplacian heads" if family[0].rows_by == (HEADS,) else ", ".join(family[0].rows_by)
    return Chart(file, f"{label[:1].upper()}{label[1:]} by {across}", caption, across, label, lines)


def write_files(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write each chart as PNG, SVG and PDF, and its data as CSV."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, but the figures need a folder of that name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # files of runs that were removed or have another number on the page
            # Only names of charts: the folder may contain the user's own files.
            if path.suffix.removeprefix(".") in (*FORMS, "csv") and re.match(r"\d+-", path.name):
                path.unlink()
        paths = []
        for chart in charts:
            for form in FORMS:
                paths.append(folder / f"{chart.name}.{form}")
                write_bytes(paths[-1], chart.file(form))
            paths.append(folder / f"{chart.name}.csv")
            write_text(paths[-1], chart.csv())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); name another --runs-dir") from None
    return paths
