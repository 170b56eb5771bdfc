"""The page of `lap report --format html`: one file that needs nothing else, `page.html.j2` with plotly.

It contains no script of ours. Its security policy lists plotly's scripts by hash, so that no other can run.
"""

import base64
import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lapcli.report import paper
from lapcli.report.claims import judge_all
from lapcli.report.collect import Grid, ReportRun, kind_in_words
from lapcli.report.figures import Experiment, experiments_of, write_files
from lapcli.report.tables import Report, ScoreTable, mean_text, paired_text, paper_text, reading
from lapcli.runs import time_of
from lapcli.runtime import __version__
from lapcli.runtime.files import read_json, write_text
from lapcli.same_recipe import HEADS

_LARGEST = 3_000_000  # bytes of an analysis figure as SVG; beyond it the PNG is shown


def write_page(report: Report, path: Path) -> list[Path]:
    """Write the page and its figures; return the page's path, then the folder of its figures if there are any."""
    experiments = experiments_of(report.grids)
    write_text(path, page(report, experiments))
    charts = [chart for experiment in experiments for chart in experiment.charts]
    if not charts:
        return [path]
    folder = path.with_name(f"{path.stem}_figures")
    write_files(charts, folder)
    return [path, folder]


def page(report: Report, experiments: Sequence[Experiment]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names of runs and values of recipes may come from other people
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {
        "mean_text": mean_text,
        "paired_text": paired_text,
        "paper_text": paper_text,
        "reading": lambda tables: _distinct(line for table in tables for line in reading(table)),
        "csv_address": lambda chart: _address("text/csv", chart.csv().encode()),
        "chart_html": lambda chart: Markup(chart.html()),  # plotly escapes what it is given
        "in_words": paper.in_words,
    }
    runs = [run for grid in report.grids for run in grid.runs]
    judged = judge_all(report.grids)
    papers = [
        (table, f"lap report --paper {which}{_runs_dir(report)}")
        for which in paper.TABLES
        for table in paper.paper_tables(which, report.grids)
        if table.has_numbers
    ]
    text = environment.get_template("page.html.j2").render(
        title=f"Laplacian heads: {len(runs)} runs",
        summary=_summary(runs),
        experiments=[_shown(experiment, report) for experiment in experiments],
        papers=papers,
        judged=[verdict for verdict in judged if verdict.status != "not run"],
        not_run=[verdict for verdict in judged if verdict.status == "not run"],
        counts=Counter(verdict.status for verdict in judged),
        runs=[_run_row(run) for run in runs],
        ladders=ladders_in(report.collection.runs[0].run.path.parent),
        notes=report.notes,
        plotly=Markup(get_plotlyjs()) if any(each.charts for each in experiments) else "",
    )
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return text.replace("SCRIPT-HASHES", " ".join(f"'sha256-{each}'" for each in dict.fromkeys(hashes)) or "'none'", 1)


def _shown(experiment: Experiment, report: Report) -> dict[str, Any]:
    """Return an experiment in the template's form."""
    grids = experiment.grids
    runs = [run for grid in grids for run in grid.runs]
    by_title = {table.title: table for table in report.tables}
    tables = [
        (by_title[grid.title], _table_command(grid, by_title[grid.title], report))
        for grid in grids
        if grid.title in by_title
    ]
    model = {key: runs[0].values.get(f"model.{key}") for key in ("layers", "heads", "width")}
    parts = [
        ", ".join(f"{key} {value}" for key, value in model.items() if value is not None),
        f"{len(runs)} runs",
        f"seeds {', '.join(dict.fromkeys(run.seed for run in runs))}",
        f"{runs[0].run.info['steps']:,} steps" if isinstance(runs[0].run.info.get("steps"), int) else "",
        str(runs[0].run.info.get("data") or ""),
    ]
    return {
        "experiment": experiment,
        "summary": "; ".join(part for part in parts if part) + ".",
        "unfinished": [_progress(run) for run in runs if not run.run.is_finished],
        "tables": tables,
        "figures": _analysis_figures(runs),
        "differences": paper.differences(grids[0]),
    }


def _progress(run: ReportRun) -> tuple[str, str, float]:
    step, steps = int(run.run.info.get("step") or 0), int(run.run.info.get("steps") or 0)
    return run.name, f"{run.run.status} at step {step:,} of {steps or '?'}", step / steps if steps else 0.0


def _table_command(grid: Grid, table: ScoreTable, report: Report) -> str:
    words = ["lap", "report", *(run.name for run in grid.runs)]
    words += ["--columns", ",".join(dict.fromkeys(column.name.split(" [")[0] for column in table.columns))]
    words += [] if grid.rows_by == (HEADS,) else ["--rows", ",".join(grid.rows_by)]
    return shlex.join(words) + _runs_dir(report)


def _runs_dir(report: Report) -> str:
    folder = report.collection.runs[0].run.path.parent
    return "" if folder == Path("runs") else f" --runs-dir {shlex.quote(str(folder))}"


def _analysis_figures(runs: Sequence[ReportRun]) -> list[tuple[str, str]]:
    """Return the figures of `lap analyze`, of single runs and of comparisons that begin with one of these runs."""
    names = [run.name for run in runs]
    folders = _distinct(
        str(path) for run in runs for path in (run.run.path.parent / "analysis", run.run.path / "analysis")
    )
    figures = []
    for path in sorted(file for folder in folders for file in Path(folder).glob("**/*.json")):
        record = read_json(path, "remove it and measure again")
        entries = record.get("runs")
        drawn = [entry.get("name") for entry in entries] if isinstance(entries, list) else []
        forms = [form for form in (".svg", ".png") if path.with_suffix(form).is_file()]
        forms = [form for form in forms if form == ".png" or path.with_suffix(form).stat().st_size <= _LARGEST] or forms
        if drawn and drawn[0] in names and forms:
            kind = {"svg": "image/svg+xml", "png": "image/png"}[forms[0][1:]]
            title = f"{record.get('what')} of {', '.join(map(str, drawn))}"
            figures.append((title, _address(kind, path.with_suffix(forms[0]).read_bytes())))
    return figures


def ladders_in(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Return the ladders of a folder of runs: name, verdicts in words, and the addresses of the figures."""
    return [
        (
            file.parent.name,
            file.read_text(encoding="utf-8"),
            [_address("image/svg+xml", figure.read_bytes()) for figure in sorted(file.parent.glob("*.svg"))],
        )
        for file in sorted(folder.glob(".ladders/*/ladder.txt"))
    ]


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _summary(runs: Sequence[ReportRun]) -> str:
    finished = sum(run.run.is_finished for run in runs)
    what = ", ".join(f"{count} of {kind}" for kind, count in Counter(map(kind_in_words, runs)).items())
    newest = max((time_of(run.run.info) for run in runs), default=0)
    when = f", the last change {datetime.fromtimestamp(newest, UTC):%Y-%m-%d %H:%M} UTC" if newest > 0 else ""
    return f"{len(runs)} runs ({what}), {finished} of them finished{when}. Made by lap {__version__}."


def _run_row(run: ReportRun) -> list[Any]:
    info = run.run.info
    steps = f"{info.get('step', '?')} of {info.get('steps', '?')}"
    hashes = [str(info.get(key) or "–")[:16] for key in ("weights_sha256", "recipe_sha256")]
    return [run.name, run.run.status, run.values.get(HEADS), run.seed, steps, *hashes]


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
