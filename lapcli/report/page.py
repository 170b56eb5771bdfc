"""One self-contained page: what was run and on what, the tables, the claims, and every figure there is.

No script and nothing from elsewhere; drawings are inline. Whatever comes from recipes, names and files is escaped.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lapcli.report.assemble import Report
from lapcli.report.claims import Verdict
from lapcli.report.collect import RunResult
from lapcli.report.figures import Drawing
from lapcli.report.grouping import Grid
from lapcli.report.page_style import STYLE
from lapcli.report.paper import recipe_differences, value_in_words
from lapcli.report.tables import Cell, Column, Table, marking, mean_text, p_text, paper_text, reading
from lapcli.runtime import __version__

STATUS = {"reproduced": "reproduced", "partly": "partly", "not": "not reproduced", "not run": "not run"}
_LARGEST = 3_000_000  # bytes of an analysis figure as a drawing; beyond it the picture is shown


def page(report: Report, papers: Sequence[Table], verdicts: Sequence[Verdict], drawings: Sequence[Drawing]) -> str:
    runs = report.collection.runs
    finished = sum(run.is_finished for run in runs)
    sections = [
        ("tables", "Our tables", _tables(report.tables)),
        ("paper", "Beside the paper", _tables(papers)),
        ("claims", "Claims of the paper", _claims(verdicts)),
        ("figures", "Figures of the grids", _drawings(drawings)),
        ("analysis", "Figures of the analyses", _analysis_figures(report)),
        ("runs", "What was run", _provenance(report)),
        ("notes", "Gaps and notes", _notes(report)),
    ]
    shown = [(key, title, body) for key, title, body in sections if body]
    menu = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in shown)
    body = "".join(f'<section id="{key}"><h2>{title}</h2>{text}</section>' for key, title, text in shown)
    lead = f"{len(runs)} runs, {finished} of them finished. Made by lap {escape(__version__)}."
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        '<link rel="icon" href="data:,">'
        f"<title>Laplacian heads: {len(runs)} runs</title><style>{STYLE}</style></head><body>"
        f"<header><h1>Laplacian heads</h1><p>{lead}</p>{_counts(verdicts)}<nav>{menu}</nav></header>"
        f"<main>{body}</main></body></html>\n"
    )


def _counts(verdicts: Sequence[Verdict]) -> str:
    """How many claims are of each kind, first thing to see."""
    boxes = []
    for status, label in STATUS.items():
        number = sum(verdict.status == status for verdict in verdicts)
        boxes.append(f'<li class="{_class(status)}"><b>{number}</b> {label}</li>')
    return f'<ul class="counts" aria-label="Claims of the paper">{"".join(boxes)}</ul>'


def _class(status: str) -> str:
    return "s-" + status.replace(" ", "-")


def _tables(tables: Sequence[Table]) -> str:
    """Side by side where they fit; what is the same for all is said once."""
    if not tables:
        return ""
    lines = _distinct(
        line for table in tables for line in [*reading(table, "–", "ddof beside the title"), *marking(table)]
    )
    if any(row.is_baseline for table in tables for row in table.rows):
        lines.append("The shaded row is the baseline.")
    return f'<div class="tables">{"".join(_table(table) for table in tables)}</div>{_fine(lines)}'


def _table(table: Table) -> str:
    header = "".join(f"<th>{escape(column.label)}</th>" for column in table.columns)
    rows = []
    for row in table.rows:
        cells = "".join(f"<td>{_cell(*pair)}</td>" for pair in zip(table.columns, row.cells, strict=True))
        base = ' class="base"' if row.is_baseline else ""
        rows.append(f'<tr{base}><th scope="row">{escape(row.label)}</th>{cells}</tr>')
    is_error = all(column.spread == "error" for column in table.columns)
    spread = "standard errors" if is_error else f"ddof&nbsp;{table.ddof}"
    ddof = f" · {spread}" if any(cell.summary for row in table.rows for cell in row.cells) else ""
    return (
        f'<article><h3>{escape(table.title)}<small>{ddof}</small></h3><div class="wide" tabindex="0"><table><thead><tr>'
        f"<th>{escape(table.row_name)}</th>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"{_fine(table.notes)}</article>"
    )


def _fine(lines: Sequence[str]) -> str:
    return f'<ul class="fine">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""


def _cell(column: Column, cell: Cell) -> str:
    if cell.summary is None:
        lines = ['<span class="gap" title="no score">–</span>']
    else:
        text = escape(mean_text(column, cell))
        marked = {"best": f"<b>{text}</b>", "second": f"<u>{text}</u>", None: text}[cell.mark]
        lines = [f"{marked} <small>({cell.summary.n})</small>"]
    if cell.paired is not None:
        p = f", {p_text(cell.paired.p)}" if cell.paired.p is not None else ""
        lines.append(f"<small>Δ {escape(column.signed(cell.paired.difference) + p)}</small>")
        if cell.paired.interval is not None:
            low, high = cell.paired.interval
            lines.append(f"<small>[{column.signed(low)}, {column.signed(high)}]</small>")
    if cell.paper is not None:
        lines.append(f"<small>paper {escape(paper_text(column, cell))}</small>")
    return "<br>".join(lines)


def _claims(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    rows = []
    for verdict in verdicts:
        claim = verdict.claim
        evidence = "".join(f"<li>{escape(line)}</li>" for line in verdict.evidence)
        elsewhere = "".join(
            f'<li><span class="{_elsewhere_class(status)}">{escape(status)}</span> {escape(title)}: {escape(told)}</li>'
            for title, status, told in verdict.elsewhere
        )
        other = f"<h4>The same rule on other runs</h4><ul>{elsewhere}</ul>" if elsewhere else ""
        is_open = " open" if verdict.status != "not run" or elsewhere else ""
        rows.append(
            f'<details class="claim {_class(verdict.status)}"{is_open}>'
            f'<summary><span class="badge">{STATUS[verdict.status]}</span> {escape(claim.text)} '
            f'<small>({escape(claim.where)})</small></summary><p class="fine">Rule: {escape(claim.rule)}.</p>'
            f"<h4>By the paper's recipe</h4><ul>{evidence}</ul>{other}</details>"
        )
    lead = (
        "<p>A verdict counts runs of the paper's own recipe alone: its data, model, schedule and length. It asks for "
        "the paper's set of data, heads, drop paths and layers; what is missing makes it partly. What the same rule "
        "says of other runs is evidence about them, and no reproduction.</p>"
    )
    return lead + "".join(rows)


def _elsewhere_class(status: str) -> str:
    return "tag " + {"holds": "s-reproduced", "partly": "s-partly"}.get(status, "s-not")


def _drawings(drawings: Sequence[Drawing]) -> str:
    figures = "".join(
        f'<figure><figcaption><b>{escape(drawing.title)}</b></figcaption><div role="img" '
        f'aria-label="{escape(drawing.caption)}">{drawing.inline(number)}</div>'
        f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
        for number, drawing in enumerate(drawings)
    )
    return f'<div class="grid">{figures}</div>' if figures else ""


def _analysis_figures(report: Report) -> str:
    """Those that compare runs first; as images, which cannot do anything but be seen."""
    found = [(whose, what, path) for (whose, what), path in report.collection.figures.items()]
    found += [(run.name, what, path) for run in report.collection.runs for what, path in run.figures.items()]
    figures = []
    for whose, what, path in found:
        source = _data_uri(path)
        if source is not None:
            title = escape(f"{what}, {whose}")
            figures.append(
                f'<figure class="white"><img alt="{title}" src="{source}"><figcaption>{title}</figcaption></figure>'
            )
    return f'<div class="grid big">{"".join(figures)}</div>' if figures else ""


def _data_uri(path: Path) -> str | None:
    picture = path.with_suffix(".png")
    if path.suffix == ".svg" and path.stat().st_size > _LARGEST and picture.is_file():
        path = picture
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
    return f"data:image/{'svg+xml' if path.suffix == '.svg' else 'png'};base64,{data}"


def _provenance(report: Report) -> str:
    runs = report.collection.runs
    versions = _distinct(
        ", ".join(f"{name} {version}" for name, version in versions.items())
        for run in runs
        if isinstance(versions := run.info.get("versions"), dict)
    )
    machines = _distinct(
        f"{run.info.get('device', 'unknown')}, {run.info.get('threads', '?')} threads a process" for run in runs
    )
    data = _distinct(
        f"{run.info.get('data', 'unknown')} (sha256 {str(run.info.get('data_sha256', ''))[:16]})" for run in runs
    )
    facts = "".join(
        f"<dt>{name}</dt><dd>{'<br>'.join(map(escape, values))}</dd>"
        for name, values in (("Versions", versions), ("Hardware", machines), ("Data", data))
    )
    lines = "".join(_run_line(run) for run in runs)
    return (
        f"<dl>{facts}</dl>{_recipe_differences(report.grids)}"
        f"<details><summary>All {len(runs)} runs</summary>"
        '<div class="wide" tabindex="0"><table class="left"><thead><tr><th>Run</th><th>Status</th>'
        "<th>Laplacian heads</th><th>Seed</th><th>Steps</th><th>Processes</th><th>Weights (sha256)</th>"
        "<th>Recipe (sha256)</th></tr></thead>"
        f"<tbody>{lines}</tbody></table></div></details>"
    )


def _run_line(run: RunResult) -> str:
    heads = (run.recipe.get("model") or {}).get("laplacian_heads")
    info = run.info
    values: list[Any] = [
        *(run.name, run.status, heads, run.seed, f"{info.get('step', '?')} of {info.get('steps', '?')}"),
        *(
            info.get("world_size", "?"),
            str(info.get("weights_sha256") or "–")[:16],
            str(info.get("recipe_sha256") or "–")[:16],
        ),
    ]
    return "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in values) + "</tr>"


def _recipe_differences(grids: Sequence[Grid]) -> str:
    """Grids that differ from the paper in the same way are named together."""
    titles: dict[str, list[str]] = {}
    for grid in grids:
        titles.setdefault(_difference(recipe_differences(grid.runs[0])), []).append(escape(grid.title))
    parts = [f"<h4>{'<br>'.join(names)}</h4>{told}" for told, names in titles.items()]
    return "<h3>Recipes against the paper's</h3>" + "".join(parts)


def _difference(found: list[tuple[str, Any, Any]] | None) -> str:
    if found is None:
        return "<p>The paper has no such experiment, or its recipe is not beside this installation.</p>"
    if not found:
        return "<p>The paper's recipe; Laplacian heads, drop path and seed are its grid.</p>"
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(_short(theirs))}</td><td>{escape(_short(ours))}</td></tr>"
        for key, theirs, ours in found
    )
    return (
        f"<details><summary>{len(found)} keys differ from the paper's recipe</summary>"
        '<div class="wide" tabindex="0"><table class="left"><thead><tr><th>Key</th><th>Paper</th><th>Here</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _notes(report: Report) -> str:
    lines = [*(f"gap: {gap}" for gap in report.gaps()), *report.notes]
    if not lines:
        return "<p>No gaps: every row has a score of every seed.</p>"
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _short(value: Any) -> str:
    text = value_in_words(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
