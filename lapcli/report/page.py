"""One self-contained page: what was run and on what, the tables, the claims, and every figure there is.

`page.html.j2` lays it out and `page.css` gives its looks. No script and nothing from elsewhere; drawings are inline.
"""

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lapcli.report.assemble import Report
from lapcli.report.claims import ClaimVerdict, judge_all
from lapcli.report.collect import RunResult
from lapcli.report.figures import Drawing, draw_all, write_files
from lapcli.report.grouping import RunGrid
from lapcli.report.paper import recipe_differences, value_in_words
from lapcli.report.paper_tables import TABLES, paper_tables
from lapcli.report.tables import ScoreTable, mean_text, p_text, paper_text, reading
from lapcli.runtime import __version__
from lapcli.runtime.files import write_for_user
from lapcli.runtime.tables import MARKING

STATUS = {"reproduced": "reproduced", "partly": "partly", "not": "not reproduced", "not run": "not run"}
_LARGEST = 3_000_000  # bytes of an analysis figure as a drawing; beyond it the picture is shown


def write_page(report: Report, path: Path) -> list[Path]:
    """Writes the page and its figures; returns the page's path, then the folder of its figures if there are any."""
    runs = report.collection.runs
    drawings = draw_all(report.grids)
    papers = [table for which in TABLES for table in paper_tables(which, runs)]
    write_for_user(path, page(report, papers, judge_all(runs), drawings))
    if not drawings:
        return [path]
    folder = path.with_name(f"{path.stem}_figures")
    write_files(drawings, folder)
    return [path, folder]


def page(
    report: Report, papers: Sequence[ScoreTable], verdicts: Sequence[ClaimVerdict], drawings: Sequence[Drawing]
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    runs = report.collection.runs
    # As globals, which macros see without being handed them.
    environment.globals |= {
        "STATUS": STATUS,
        "facts": _facts(runs),
        "recipes": _recipes(report.grids),
        "run_rows": list(map(_run_row, runs)),
        "mean_text": mean_text,
        "p_text": p_text,
        "paper_text": paper_text,
        "reading_of": reading_of,
        "spread_in_title": spread_in_title,
    }
    template = environment.get_template("page.html.j2")
    return template.render(
        version=__version__,
        runs=runs,
        tables=report.tables,
        papers=papers,
        verdicts=verdicts,
        drawings=drawings,
        figures=_analysis_figures(report),
        notes=[*(f"gap: {gap}" for gap in report.gaps()), *report.notes],
    ).lstrip()


def reading_of(tables: Sequence[ScoreTable]) -> list[str]:
    """How to read the tables; what is the same for all is said once."""
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
    is_error = all(column.spread == "error" for column in table.columns)
    return " · standard errors" if is_error else f" · ddof\N{NO-BREAK SPACE}{table.ddof}"


def _analysis_figures(report: Report) -> list[tuple[str, str]]:
    """Title and data address of each, those that compare runs first."""
    files = [(f"{what}, {whose}", path) for (whose, what), path in report.collection.figures.items()]
    files += [(f"{what}, {run.name}", path) for run in report.collection.runs for what, path in run.figures.items()]
    return [(title, address) for title, path in files if (address := _data_address(path)) is not None]


def _data_address(path: Path) -> str | None:
    picture = path.with_suffix(".png")
    if path.suffix == ".svg" and path.stat().st_size > _LARGEST and picture.is_file():
        path = picture
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
    return f"data:image/{'svg+xml' if path.suffix == '.svg' else 'png'};base64,{data}"


def _facts(runs: Sequence[RunResult]) -> dict[str, list[str]]:
    """Versions, machines and data of all runs, each once."""
    versions = [run.info["versions"] for run in runs if isinstance(run.info.get("versions"), dict)]
    return {
        "Versions": _distinct(", ".join(f"{name} {version}" for name, version in some.items()) for some in versions),
        "Hardware": _distinct(
            f"{run.info.get('device', 'unknown')}, {run.info.get('threads', '?')} threads a process" for run in runs
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


def _recipes(grids: Sequence[RunGrid]) -> list[tuple[list[str], list[list[str]] | None]]:
    """Titles of grids with what differs from the paper's recipe; those that differ in the same way stand together."""
    together: dict[str, tuple[list[str], list[list[str]] | None]] = {}
    for grid in grids:
        differences = recipe_differences(grid.runs[0])
        rows = None
        if differences is not None:
            rows = [[key, _short(theirs), _short(ours)] for key, theirs, ours in differences]
        together.setdefault(repr(rows), ([], rows))[0].append(grid.title)
    return list(together.values())


def _short(value: Any) -> str:
    text = value_in_words(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
