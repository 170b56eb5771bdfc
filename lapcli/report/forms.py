"""The forms of a table: text, Markdown, LaTeX, CSV and JSON.

A gap is `-` for people, an empty field in CSV and null in JSON. The best and the second are `*` and `+` in text.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lapcli.report.tables import (
    Cell,
    Column,
    Row,
    Table,
    explanation,
    marking,
    mean_text,
    paired_text,
    paper_text,
)


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
    said = [_markdown(line) + "  " for line in [*explanation(table), *marking(table)]]
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
    "[": "{[}",  # at the start of a row it would be an option of the line before
    "]": "{]}",
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
    caption = " ".join([f"{table.title}.", *explanation(table), *marking(table)])
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
    *("missing_seeds", "standard_error"),
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
                flat.append(told["standard_error"])
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
        "standard_error": scaled(summary.error) if summary else None,
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
            {
                "name": c.name,
                "label": c.label,
                "unit": "%" if c.percent else None,
                "better": c.better,
                "spread": c.spread,
            }
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
