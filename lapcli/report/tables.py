"""A table of numbers and its forms: text, Markdown, LaTeX, CSV and JSON.

A gap is `-` for people, an empty field in CSV and null in JSON. The best mean of a column is bold and the second
underlined, as in the paper (text: `*` and `+`); means that read the same share their mark.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lapcli.report.grouping import Grid, RowKey
from lapcli.report.statistics import Paired, Summary, compare, summarise

GAP = "-"


@dataclass(frozen=True)
class Column:
    name: str
    label: str
    percent: bool
    better: Literal["higher", "lower"] | None = None
    digits: int = 2

    def shown(self, value: float) -> str:
        return f"{value * self.scale:.{self.digits}f}"

    def signed(self, value: float) -> str:
        return f"{value * self.scale:+z.{self.digits}f}"

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0


@dataclass
class Cell:
    """Empty: a gap."""

    summary: Summary | None = None
    paired: Paired | None = None  # against the baseline row
    missing: list[str] = field(default_factory=list)  # seeds of the table that this cell lacks
    mark: Literal["best", "second"] | None = None
    paper: tuple[float, float | None] | None = None  # in the column's shown unit: mean and deviation


@dataclass
class Row:
    label: str
    cells: list[Cell]
    is_baseline: bool = False
    is_given: bool = False  # the paper's alone, such as Random


@dataclass
class Table:
    title: str
    row_name: str
    columns: list[Column]
    rows: list[Row]
    ddof: int
    seeds: list[str]
    notes: list[str] = field(default_factory=list)
    baseline: str | None = None
    has_paper: bool = False

    def gaps(self) -> list[str]:
        found = []
        for row in self.rows:
            if row.is_given:
                continue
            for column, cell in zip(self.columns, row.cells, strict=True):
                where = f"{self.title}: row {row.label}, {column.label}"
                if cell.summary is None:
                    found.append(f"{where}: no score")
                elif cell.missing:
                    found.append(f"{where}: no score of seed {', '.join(cell.missing)}")
        return found


#: Measures with a name, a unit or a direction of their own; the others are shown as they are.
_PERCENT = ("top1", "top5", "linear", "knn", "ade20k", "arc", "mmlu", "gsm8k", "humaneval", "spelling", "hellaswag")
_LOWER = ("loss", "bpb", "bits_per_byte", "perplexity")
LABELS = {
    "top1": "top-1 (%)",
    "top5": "top-5 (%)",
    "linear": "linear probe (%)",
    "ade20k": "ADE20K mIoU (%)",
    "arc_easy": "ARC-Easy (%)",
    "arc_challenge": "ARC-Challenge (%)",
    "mmlu": "MMLU (%)",
    "gsm8k": "GSM8K (%)",
    "humaneval": "HumanEval (%)",
}


def column_of(name: str) -> Column:
    task, _, rest = name.partition(" [")
    short = task.removeprefix("validation_")
    if "." in task:  # an analysis
        measure = task.partition(".")[2]
        is_share = "_share" in measure
        better: Any = None
        return Column(
            name,
            measure.replace("_", " ") + (" (%)" if is_share else ""),
            is_share,
            better,
            1 if is_share or measure.startswith("k_") else 3,
        )
    percent = short.startswith(_PERCENT) and short not in ("linear_loss",)
    label = LABELS.get(task, task.replace("_", " ") + (" (%)" if percent else ""))
    lower = any(word in short for word in _LOWER)
    return Column(
        name,
        label + (f" [{rest}" if rest else ""),
        percent,
        "lower" if lower else "higher" if percent else None,
        4 if lower else 2,
    )


def table_of(grid: Grid, metrics: Sequence[str], row_name: str, ddof: int, baseline: RowKey | None) -> Table:
    """One grid: a row for each value, a column for each measure."""
    columns = [column_of(metric) for metric in metrics]
    rows = [
        Row(key.label, [cell_of(grid, key, metric, ddof, baseline) for metric in metrics], key == baseline)
        for key in grid.rows
    ]
    table = Table(grid.title, row_name, columns, rows, ddof, grid.seeds, baseline=baseline.label if baseline else None)
    mark(table)
    return table


def cell_of(grid: Grid, row: RowKey, metric: str, ddof: int, baseline: RowKey | None) -> Cell:
    values = grid.values(row, metric) if row in grid.rows else {}
    against = grid.values(baseline, metric) if baseline is not None and baseline != row else {}
    return Cell(
        summarise(list(values.values()), ddof),
        compare(values, against) if against else None,
        [seed for seed in grid.seeds if seed not in values] if values else [],
    )


def mark(table: Table) -> None:
    """Best and second of each column, by the means as they are shown."""
    for number, column in enumerate(table.columns):
        cells = [row.cells[number] for row in table.rows if row.cells[number].summary is not None and not row.is_given]
        if column.better is None or len(cells) < 2:
            continue
        shown = {id(cell): float(column.shown(cell.summary.mean)) for cell in cells if cell.summary}
        ranked = sorted(set(shown.values()), reverse=column.better == "higher")
        for cell in cells:
            place = ranked.index(shown[id(cell)])
            cell.mark = ("best", "second")[place] if place < 2 and len(ranked) > 1 else None


def explanation(table: Table) -> list[str]:
    """What the numbers are, in words, and what has to be said of this table; belongs under every form of it."""
    return [*reading(table), *table.notes]


def reading(table: Table) -> list[str]:
    """How to read it; the same for tables of the same kind."""
    lines = [f"Mean ± standard deviation over seeds (ddof {table.ddof}), n in parentheses; {GAP} is a gap, not a zero."]
    if table.baseline is not None and any(cell.paired for row in table.rows for cell in row.cells):
        lines.append(
            f"Δ: mean difference from row {table.baseline} over the seeds that both have, its 95% interval, and p of "
            "the two-sided paired t-test (not corrected for the number of rows)."
        )
    if table.has_paper:
        lines.append("paper: its number (ours − paper).")
    return lines


def mean_text(column: Column, cell: Cell, sign: str = "±") -> str:
    if cell.summary is None:
        return GAP
    std = f" {sign} {column.shown(cell.summary.std)}" if cell.summary.std is not None else ""
    return f"{column.shown(cell.summary.mean)}{std}"


def paired_text(column: Column, cell: Cell) -> str:
    if cell.paired is None:
        return ""
    text = f"Δ {column.signed(cell.paired.difference)}"
    if cell.paired.interval is not None:
        low, high = cell.paired.interval
        text += f" [{column.signed(low)}, {column.signed(high)}]"
    if cell.paired.p is not None:
        text += f" {p_text(cell.paired.p)}"
    return text


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def paper_text(column: Column, cell: Cell) -> str:
    if cell.paper is None:
        return ""
    mean, std = cell.paper
    text = f"{mean:.{column.digits}f}" + (f" ± {std:.{column.digits}f}" if std is not None else "")
    if cell.summary is not None:
        text += f" ({cell.summary.mean * column.scale - mean:+z.{column.digits}f})"
    return text


def _headers(table: Table) -> list[tuple[Column, list[str]]]:
    """Of each column: the parts that are shown."""
    shown = []
    for number, column in enumerate(table.columns):
        parts = ["mean"]
        if any(row.cells[number].paired for row in table.rows):
            parts.append("paired")
        if table.has_paper:
            parts.append("paper")
        shown.append((column, parts))
    return shown


def _baseline(row: Row) -> str:
    return " (baseline)" if row.is_baseline and row.label != "Baseline" else ""


def _part_name(table: Table, column: Column, part: str) -> str:
    return {"mean": column.label, "paired": f"Δ to {table.baseline}", "paper": "paper (ours − paper)"}[part]


def to_text(table: Table) -> str:
    header, body = [table.row_name], [[row.label + _baseline(row)] for row in table.rows]
    for number, (column, parts) in enumerate(_headers(table)):
        for part in parts:
            header.append(_part_name(table, column, part))
            for row, line in zip(table.rows, body, strict=True):
                line.append(_text_part(column, row.cells[number], part))
    widths = [max(len(line[place]) for line in [header, *body]) for place in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *body]
    ]
    marks = ["* best, + second."] if any(cell.mark for row in table.rows for cell in row.cells) else []
    return "\n".join([table.title, "", *lines, "", *marks, *explanation(table)])


def _text_part(column: Column, cell: Cell, part: str) -> str:
    if part == "mean":
        n = f" ({cell.summary.n})" if cell.summary else ""
        return mean_text(column, cell) + n + {"best": " *", "second": " +", None: ""}[cell.mark]
    return paired_text(column, cell) if part == "paired" else paper_text(column, cell)


def to_markdown(table: Table) -> str:
    header = [_markdown(table.row_name)]
    body = [[_markdown(row.label) + _baseline(row)] for row in table.rows]
    for number, (column, parts) in enumerate(_headers(table)):
        for part in parts:
            header.append(_markdown(_part_name(table, column, part)))
            for row, line in zip(table.rows, body, strict=True):
                cell = row.cells[number]
                text = _markdown(_text_part(column, replace(cell, mark=None), part))
                if part == "mean" and cell.mark:
                    text = f"**{text}**" if cell.mark == "best" else f"<u>{text}</u>"
                line.append(text)
    lines = ["| " + " | ".join(line) + " |" for line in [header, *body]]
    lines.insert(1, "|" + " --- |" * len(header))
    said = [_markdown(line) + "  " for line in explanation(table)]
    return "\n".join([f"**{_markdown(table.title)}**", "", *lines, "", *said])


def _markdown(text: str) -> str:
    """What comes from recipes and names must not become markup."""
    escaped = "".join(f"\\{letter}" if letter in "\\|`*_[]<>#" else letter for letter in text)
    return escaped.replace("&", "&amp;").replace("\n", " ")


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "·": r"\textperiodcentered{}",
    "−": r"$-$",
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
}


def latex_escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter if letter.isascii() else "?") for letter in text.replace("\n", " "))


def to_latex(table: Table) -> str:
    """In the paper's style; needs the package booktabs alone."""
    header = [latex_escape(table.row_name)]
    for column, parts in _headers(table):
        header += [latex_escape(_part_name(table, column, part)) for part in parts]
    caption = f"{table.title}. {' '.join(explanation(table))} Best in bold, second best underlined."
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}[h]",
        "  \\centering",
        f"  \\caption{{{latex_escape(caption)}}}",
        f"  \\begin{{tabular}}{{@{{}}l{'c' * (len(header) - 1)}@{{}}}}",
        "    \\toprule",
        "    " + " & ".join(f"\\textbf{{{name}}}" for name in header) + " \\\\",
        "    \\midrule",
    ]
    for row in table.rows:
        cells = [latex_escape(row.label)]
        for number, (column, parts) in enumerate(_headers(table)):
            cells += [_latex_part(column, row.cells[number], part) for part in parts]
        lines.append("    " + " & ".join(cells) + " \\\\")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}"])


def _latex_part(column: Column, cell: Cell, part: str) -> str:
    if part != "mean":
        return latex_escape(paired_text(column, cell) if part == "paired" else paper_text(column, cell))
    if cell.summary is None:
        return "--"
    number = f"${mean_text(column, cell, chr(92) + 'pm')}$"
    if cell.mark == "best":
        number = f"$\\mathbf{{{number[1:-1]}}}$"
    elif cell.mark == "second":
        number = f"\\underline{{{number}}}"
    return f"{number} ({cell.summary.n})"


CSV_HEADER = [
    *("table", "row", "measure", "unit", "mean", "std", "ddof", "n", "interval_low", "interval_high"),
    *("difference", "pairs", "difference_low", "difference_high", "p", "paper_mean", "paper_std", "ours_minus_paper"),
    "missing_seeds",
]


def to_csv(tables: Sequence[Table]) -> str:
    """One cell a line, in the unit that is shown; a gap has empty fields."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                told = cell_to_dict(column, cell, table.ddof)
                flat = [told["mean"], told["std"], told["ddof"], told["n"], *(told["interval"] or ["", ""])]
                paired = told["paired"] or {}
                flat += [
                    paired.get("difference"),
                    paired.get("n"),
                    *(paired.get("interval") or ["", ""]),
                    paired.get("p"),
                ]
                paper = told["paper"] or {}
                flat += [paper.get("mean"), paper.get("std"), paper.get("ours_minus_paper"), " ".join(cell.missing)]
                unit = "%" if column.percent else ""
                writer.writerow(
                    [table.title, row.label, column.name, unit, *("" if value is None else value for value in flat)]
                )
    return text.getvalue()


def cell_to_dict(column: Column, cell: Cell, ddof: int) -> dict[str, Any]:
    """Plain values in the shown unit; null where there is none."""
    scale, summary, paired = column.scale, cell.summary, cell.paired
    scaled = lambda value: None if value is None else value * scale  # noqa: E731
    return {
        "mean": scaled(summary.mean) if summary else None,
        "std": scaled(summary.std) if summary else None,
        "ddof": ddof,
        "n": summary.n if summary else 0,
        "interval": [bound * scale for bound in summary.interval] if summary and summary.interval else None,
        "missing_seeds": cell.missing,
        "mark": cell.mark,
        "paired": None
        if paired is None
        else {
            "difference": paired.difference * scale,
            "n": paired.n,
            "interval": [bound * scale for bound in paired.interval] if paired.interval else None,
            "p": paired.p,
        },
        "paper": None
        if cell.paper is None
        else {
            "mean": cell.paper[0],
            "std": cell.paper[1],
            "ours_minus_paper": summary.mean * scale - cell.paper[0] if summary else None,
        },
    }


def to_dict(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "rows_by": table.row_name,
        "seeds": table.seeds,
        "ddof": table.ddof,
        "baseline": table.baseline,
        "columns": [
            {"name": c.name, "label": c.label, "unit": "%" if c.percent else None, "better": c.better}
            for c in table.columns
        ],
        "rows": [
            {
                "row": row.label,
                "cells": {
                    column.name: cell_to_dict(column, cell, table.ddof)
                    for column, cell in zip(table.columns, row.cells, strict=True)
                },
            }
            for row in table.rows
        ],
        "notes": explanation(table),
    }


def _joined(form: Callable[[Table], str]) -> Callable[[Sequence[Table]], str]:
    return lambda tables: "\n\n".join(form(table) for table in tables)


FORMATS: dict[str, Callable[[Sequence[Table]], str]] = {
    "table": _joined(to_text),
    "markdown": _joined(to_markdown),
    "latex": _joined(to_latex),
    "csv": lambda tables: to_csv(tables).rstrip("\n"),
    "json": lambda tables: json.dumps([to_dict(table) for table in tables], indent=2),
}
