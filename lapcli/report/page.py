"""One self-contained page: first the runs, experiment by experiment, then the comparison with the paper.

`page.html.j2` is its layout, `page.css` its style and `page.js` its only script. Nothing is loaded from elsewhere, and
no other script may run: the page's security policy names this one by its hash.
"""

import base64
import gzip
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from lapcli.analysis.drawing import FigureFormat
from lapcli.analysis.measurements import MEASUREMENTS
from lapcli.report.assemble import Report
from lapcli.report.chart import Chart, plan_colours
from lapcli.report.claims import ClaimVerdict, judge_all
from lapcli.report.collect import RunResult
from lapcli.report.figures import Experiment, experiments_of, write_files
from lapcli.report.forms import MARKING, write_for_user
from lapcli.report.grouping import kind_in_words
from lapcli.report.paper import recipe_differences, value_in_words
from lapcli.report.paper_tables import TABLES, paper_tables
from lapcli.report.reproduce import commands_of, drawing_command, figure_command, paper_command, table_command
from lapcli.report.tables import ScoreTable, mean_text, p_text, paper_text, reading
from lapcli.runs import time_of
from lapcli.runtime import __version__

STATUS = {"reproduced": "reproduced", "partly": "partly", "not": "not reproduced", "not run": "not run"}
_LARGEST = 3_000_000  # bytes of an analysis figure as SVG; beyond it the PNG is shown
_LARGEST_CSV = 300_000  # bytes of data; larger data is compressed
_FORMS = ("svg", "png")  # formats of the figures beside the page


def write_page(
    report: Report, path: Path, figure_format: FigureFormat | None = None, refresh: int | None = None
) -> list[Path]:
    """Write the page and its figures; return the page's path, then the folder of its figures if there are any.

    `refresh`: seconds after which a browser loads the page again.
    """
    experiments = experiments_of(report.grids)
    write_for_user(path, page(report, experiments, refresh))
    charts = [chart for experiment in experiments for chart in experiment.charts]
    if not charts:
        return [path]
    folder = path.with_name(f"{path.stem}_figures")
    write_files(charts, folder, _FORMS, figure_format or FigureFormat())
    return [path, folder]


def page(report: Report, experiments: Sequence[Experiment], refresh: int | None = None) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        # Names of runs and values of recipes may come from other people.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in the template fails instead of leaving a blank.
        undefined=StrictUndefined,
    )
    runs = report.collection.runs
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    # As globals, because macros see them without passing them as arguments.
    environment.globals |= {
        "STATUS": STATUS,
        "facts": _facts(runs),
        "run_rows": list(map(_run_row, runs)),
        "mean_text": mean_text,
        "p_text": p_text,
        "paper_text": paper_text,
        "reading_of": reading_of,
        "spread_in_title": spread_in_title,
    }
    first = 0
    shown = []
    for experiment in experiments:
        shown.append(_shown(experiment, report, first))
        first += len(experiment.charts)
    return (
        environment.get_template("page.html.j2")
        .render(
            title=f"Laplacian heads: {counted(len(runs), 'run')}",
            summary=_summary(runs),
            experiments=shown,
            papers=_Papers.of(report),
            verdicts=[_Verdict(**vars(verdict)) for verdict in judge_all(runs)],
            runs=runs,
            notes=[*(f"gap: {gap}" for gap in report.gaps()), *report.notes],
            script=script,
            # Of exactly the text between the tags: a blank that the template adds there would disable the script.
            script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            refresh=refresh,
        )
        .lstrip()
    )


@dataclass
class _Drawing:
    chart: Chart
    svg: str
    data: str
    csv: str
    legend: list[tuple[str, str]]  # of lines that are not runs
    commands: list[str]


@dataclass
class _Figure:
    title: str
    caption: str
    source: str
    csv: str
    file: str
    commands: list[str]


@dataclass
class _Shown:
    """An experiment as the template reads it."""

    number: int
    title: str
    summary: str
    plans: list[dict[str, Any]]
    running: list[dict[str, Any]]
    tables: list[tuple[ScoreTable, str]]
    drawings: list[_Drawing]
    figures: list[_Figure]
    commands: list[tuple[str, list[str]]]
    differences: list[list[str]] | None

    @property
    def score_tables(self) -> list[ScoreTable]:
        return [table for table, _ in self.tables]


@dataclass
class _Verdict(ClaimVerdict):
    @property
    def is_told(self) -> bool:
        """Whether the page shows this claim: it was judged on some runs."""
        return self.status != "not run" or bool(self.elsewhere)

    @property
    def elsewhere_counts(self) -> list[tuple[str, int]]:
        return list(Counter(status for _, status, _ in self.elsewhere).items())


@dataclass
class _Papers:
    """The paper's tables that contain a number of ours, and the titles of the others."""

    tables: list[tuple[ScoreTable, str]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    @property
    def score_tables(self) -> list[ScoreTable]:
        return [table for table, _ in self.tables]

    @classmethod
    def of(cls, report: Report) -> "_Papers":
        papers = cls()
        for which in TABLES:
            for table in paper_tables(which, report.collection.runs):
                if any(cell.summary for row in table.rows for cell in row.cells):
                    papers.tables.append(
                        (table, paper_command(which, report.collection.runs, report.collection.folders))
                    )
                else:
                    papers.empty.append(table.title)
        return papers


def _summary(runs: Sequence[RunResult]) -> str:
    finished = sum(run.is_finished for run in runs)
    kinds = Counter(kind_in_words(run) for run in runs)
    newest = max((time_of(run.info) for run in runs), default=0)
    when = f", the last change {datetime.fromtimestamp(newest, UTC):%Y-%m-%d %H:%M} UTC" if newest > 0 else ""
    what = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    return f"{counted(len(runs), 'run')} ({what}), {finished} of them finished{when}. Made by lap {__version__}."


def _shown(experiment: Experiment, report: Report, first: int) -> _Shown:
    """Prepare an experiment. `first`: the number of its first drawing on the page, used in the ids of its parts."""
    runs = experiment.runs
    names = {run.name for run in runs}
    folder = runs[0].path.parent
    colours = plan_colours(list(experiment.plans))
    tables = []
    for grid, table in report.tables_of_grids():
        if {run.name for run in grid.runs} <= names:
            columns = [column.name for column in table.columns]
            tables.append((table, table_command(grid.runs, columns, report.rows, folder)))
    return _Shown(
        experiment.number,
        experiment.title,
        _experiment_summary(experiment),
        [
            {
                "name": name,
                "colour": colours[name][0],
                "runs": [run.name for run in its_runs],
                "seeds": [run.seed for run in its_runs],
            }
            for name, its_runs in experiment.plans.items()
        ],
        [_unfinished(run) for run in runs if not run.is_finished],
        tables,
        [_drawing(chart, first + place, runs) for place, chart in enumerate(experiment.charts)],
        _analysis_figures(report, runs),
        [(run.name, commands_of(run)) for run in runs],
        _differences(runs[0]),
    )


def _experiment_summary(experiment: Experiment) -> str:
    run = experiment.runs[0]
    model = run.recipe.get("model") or {}
    size = [f"{model[key]} {key}" for key in ("layers", "heads") if key in model]
    size += [f"width {model['width']}"] if "width" in model else []
    plans, seeds = experiment.plans, {one.seed for one in experiment.runs}
    data = str(run.info.get("data") or "")
    parts = [
        ", ".join(size),
        f"{counted(len(experiment.runs), 'run')} of {counted(len(plans), 'plan')} and {counted(len(seeds), 'seed')}",
        f"{run.info['steps']:,} steps" if isinstance(run.info.get("steps"), int) else "",
        data,
    ]
    return "; ".join(part for part in parts if part) + "."


def _unfinished(run: RunResult) -> dict[str, Any]:
    step, steps = (run.info.get(key) or 0 for key in ("step", "steps"))
    # `run.json` has the step of the last save; the curve is ahead of it.
    step = max([int(step), *(int(line["step"]) for line in run.curve[-1:])])
    return {
        "name": run.name,
        "share": round(step / steps, 3) if steps else 0,
        "text": f"{run.status} at step {step:,} of {f'{steps:,}' if steps else '?'}",
    }


def _drawing(chart: Chart, number: int, runs: Sequence[RunResult]) -> _Drawing:
    svg, data = chart.inline(number)
    drawn = {line.run for line in chart.lines if line.run}
    legend = [] if drawn or len(chart.lines) < 2 else [(line.name, line.colour) for line in chart.lines]
    command = drawing_command([run for run in runs if run.name in drawn or not drawn])
    return _Drawing(chart, svg, data, _csv_address(chart.csv().encode())[0], legend, [command])


def _csv_address(content: bytes) -> tuple[str, str]:
    """Return the data as a `data:` address, and the ending of its file name."""
    if len(content) <= _LARGEST_CSV:
        return f"data:text/csv;base64,{base64.b64encode(content).decode()}", ".csv"
    # Without the time, so that the same runs give the same page.
    packed = gzip.compress(content, 9, mtime=0)
    return f"data:application/gzip;base64,{base64.b64encode(packed).decode()}", ".csv.gz"


def _analysis_figures(report: Report, runs: Sequence[RunResult]) -> list[_Figure]:
    """Return the figures of these runs, comparisons first; a comparison belongs to the experiment of its first run."""
    collection, by_name = report.collection, {run.name: run for run in runs}
    drawn: list[tuple[str, list[RunResult], Path]] = []
    for (whose, what), path in collection.figures.items():
        compared = collection.compared.get((whose, what), [])
        if compared and compared[0] in by_name:
            drawn.append((what, [by_name[name] for name in compared if name in by_name], path))
    drawn += [(what, [run], path) for run in runs for what, path in run.figures.items()]
    figures = []
    for what, its_runs, path in drawn:
        source = _data_address(path)
        if source is None:
            continue
        table = path.with_suffix(".csv")
        csv, ending = _csv_address(table.read_bytes()) if table.is_file() else ("", "")
        names = ", ".join(run.name for run in its_runs)
        title = MEASUREMENTS[what].help.split(":")[0].rstrip(".") if what in MEASUREMENTS else what
        commands = [figure_command(what, its_runs)] if what in MEASUREMENTS else []
        figures.append(_Figure(title, f"Of {names}.", source, csv, f"{what}{ending}", commands))
    return figures


def reading_of(tables: Sequence[ScoreTable]) -> list[str]:
    """Explain how to read the tables, each line once."""
    lines = []
    for table in tables:
        lines += reading(table, "–", "ddof beside the title")
        lines += [MARKING] if any(cell.mark for row in table.rows for cell in row.cells) else []
    if any(row.is_baseline for table in tables for row in table.rows):
        lines.append("The shaded row is the baseline.")
    return _distinct(lines)


def spread_in_title(table: ScoreTable) -> str:
    if not any(cell.summary for row in table.rows for cell in row.cells):
        return ""
    if all(column.spread == "error" for column in table.columns):
        return " · standard errors"
    has_seeds = any(cell.summary and cell.summary.std is not None for row in table.rows for cell in row.cells)
    return f" · ± a deviation, ddof\N{NO-BREAK SPACE}{table.ddof}" if has_seeds else " · one seed"


def _data_address(path: Path) -> str | None:
    picture = path.with_suffix(".png")
    if path.suffix == ".svg" and path.stat().st_size > _LARGEST and picture.is_file():
        path = picture
    return _image_address(path, path.stat().st_mtime_ns) if path.is_file() else None


@cache
def _image_address(path: Path, _changed: int) -> str | None:
    """Return the figure as a `data:` address; the time of its last change is part of the cache's key, for `--watch`."""
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
    return f"data:image/{'svg+xml' if path.suffix == '.svg' else 'png'};base64,{data}"


def _facts(runs: Sequence[RunResult]) -> dict[str, list[str]]:
    """Return versions, machines and data of all runs, each once."""
    versions = [run.info["versions"] for run in runs if isinstance(run.info.get("versions"), dict)]
    return {
        "Versions": _distinct(", ".join(f"{name} {version}" for name, version in some.items()) for some in versions),
        "Hardware": _distinct(
            f"{run.info.get('device', 'unknown')}, threads a process: {run.info.get('threads', '?')}" for run in runs
        ),
        "Data": _distinct(
            f"{run.info.get('data', 'unknown')} (sha256 {str(run.info.get('data_sha256', ''))[:16]})" for run in runs
        ),
    }


def _run_row(run: RunResult) -> list[Any]:
    info = run.info
    return [
        *(run.name, run.status, (run.recipe.get("model") or {}).get("laplacian_heads"), run.seed),
        *(f"{info.get('step', '?')} of {info.get('steps', '?')}", info.get("world_size", "?")),
        *(str(info.get(key) or "–")[:16] for key in ("weights_sha256", "recipe_sha256")),
    ]


def _differences(run: RunResult) -> list[list[str]] | None:
    """Return differences from the paper's recipe: key, theirs, ours."""
    differences = recipe_differences(run)
    if differences is None:
        return None
    return [[key, _short(theirs), _short(ours)] for key, theirs, ours in differences]


def _short(value: Any) -> str:
    text = value_in_words(value)
    return text if len(text) <= 200 else text[:197] + "..."


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
