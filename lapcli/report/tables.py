"""A table of scores: its cells, their marks and texts, and the formats that `lap report` prints.

The best mean of a column is bold and the second underlined, as in the paper; means that read the same share their mark.
A gap is `-` for people, an empty field in CSV and null in JSON.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lapcli.evaluation.benchmarks import BENCHMARKS, PAPER_TASKS
from lapcli.report.collect import Number
from lapcli.report.costs import PREFIX
from lapcli.report.forms import GAP, Entry, Table, to_latex, to_markdown, to_text
from lapcli.report.grouping import RowKey, RunGrid
from lapcli.report.statistics import Paired, Summary, compare, summarise
from lapcli.runtime.tables import to_csv


@dataclass(frozen=True)
class ScoreColumn:
    name: str
    label: str
    percent: bool
    better: Literal["higher", "lower"] | None = None
    digits: int = 2
    spread: Literal["deviation", "error"] = "deviation"  # the number after the ±

    factor: float = 1.0  # from the number's own unit to the one that is shown

    def shown(self, value: float) -> str:
        return f"{value * self.scale:,.{self.digits}f}" if self.is_cost else f"{value * self.scale:.{self.digits}f}"

    def signed(self, value: float) -> str:
        # `z`: a difference that rounds to zero is +0.00, never -0.00.
        return f"{value * self.scale:+z.{self.digits}f}"

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else self.factor

    @property
    def is_cost(self) -> bool:
        """Whether this is a cost, which has neither differences nor marks."""
        return self.name.startswith(PREFIX)


@dataclass
class ScoreCell:
    """One score over seeds; without a summary it is a gap."""

    summary: Summary | None = None
    paired: Paired | None = None  # against the baseline row
    missing: list[str] = field(default_factory=list)  # seeds of the table that this cell lacks
    mark: Literal["best", "second"] | None = None
    paper: tuple[float, float | None] | None = None  # in the column's shown unit: mean and deviation


@dataclass
class ScoreRow:
    label: str
    cells: list[ScoreCell]
    is_baseline: bool = False
    is_given: bool = False  # only in the paper, such as Random


@dataclass
class ScoreTable:
    title: str
    row_name: str
    columns: list[ScoreColumn]
    rows: list[ScoreRow]
    ddof: int
    seeds: list[str]
    notes: list[str] = field(default_factory=list)
    baseline: str | None = None
    has_paper: bool = False

    def gaps(self) -> list[str]:
        """Describe every missing score."""
        gaps = []
        for row in self.rows:
            if row.is_given:
                continue
            for column, cell in zip(self.columns, row.cells, strict=True):
                where = f"{self.title}: row {row.label}, {column.label}"
                if cell.summary is None:
                    gaps.append(f"{where}: no score")
                elif cell.missing:
                    gaps.append(f"{where}: no score of seed {', '.join(cell.missing)}")
        return gaps


#: Our own scores and validations; those of other tasks have unit and direction in their results.
_PERCENT = ("top1", "top5", "linear", "knn", "ade20k")
_LOWER = ("loss", "bpb", "bits_per_byte")
LABELS = {
    "top1": "top-1 (%)",
    "top5": "top-5 (%)",
    "linear": "linear probe (%)",
    "knn": "k-NN (%)",
    "ade20k": "ADE20K mIoU (%)",
    **{name: f"{BENCHMARKS[name].label} (%)" for name in PAPER_TASKS},
}


#: Costs in words, with their digits and the factor to the unit that is shown.
_COSTS = {
    "added_parameters": ("added parameters", 0, 1.0),
    "added_flops": ("added FLOPs a token", 0, 1.0),
    "flops_per_step": ("GFLOPs a step", 2, 1e-9),
    "peak_memory": ("peak memory (MB)", 0, 1e-6),
}


def column_of(name: str, number: Number | None = None) -> ScoreColumn:
    """Return the column of a measure; `number`: one of its values, which knows the unit and the direction."""
    task, _, rest = name.partition(" [")
    short = task.removeprefix("validation_")
    if task.startswith(PREFIX):
        label, digits, factor = _COSTS.get(task.removeprefix(PREFIX), (None, 0, 1.0))
        return ScoreColumn(
            name, label or task.removeprefix(PREFIX).replace("_", " "), False, None, digits, factor=factor
        )
    if "." in task:  # an analysis
        measure = task.partition(".")[2]
        is_share = "_share" in measure
        label = measure.replace("_", " ") + (" (%)" if is_share else "")
        return ScoreColumn(name, label, is_share, None, 1 if is_share or measure.startswith("k_") else 3)
    if short == task and task in BENCHMARKS:  # only for evaluations: the lookup may import plugins
        benchmark = BENCHMARKS[task]
        percent, lower = benchmark.is_share, benchmark.is_lower_better
        label = benchmark.label + (" (%)" if percent else "")
    else:
        percent = short.startswith(_PERCENT)
        lower = any(word in short for word in _LOWER)
        if number is not None and number.is_fraction is not None:
            percent, lower = number.is_fraction, number.higher_is_better is False
        label = LABELS.get(task, task.replace("_", " ") + (" (%)" if percent else ""))
        if short != task and short in LABELS:
            label = f"validation {LABELS[short]}"
    return ScoreColumn(
        name,
        label + (f" [{rest}" if rest else ""),
        percent,
        "lower" if lower else "higher" if percent or (number and number.higher_is_better) else None,
        4 if lower else 2,
    )


def table_of(grid: RunGrid, metrics: Sequence[str], row_name: str, ddof: int, baseline: RowKey | None) -> ScoreTable:
    """Make the table of a grid: a row for each value, a column for each measure."""
    columns = [column_of(metric, grid.number(metric)) for metric in metrics]
    rows = [
        ScoreRow(key.label, [cell_of(grid, key, metric, ddof, baseline) for metric in metrics], key == baseline)
        for key in grid.rows
    ]
    label = baseline.label if baseline else None
    table = ScoreTable(grid.title, row_name, columns, rows, ddof, grid.seeds, baseline=label)
    mark_best(table)
    return table


def cell_of(grid: RunGrid, row: RowKey, metric: str, ddof: int, baseline: RowKey | None) -> ScoreCell:
    values = grid.values(row, metric) if row in grid.rows else {}
    against = grid.values(baseline, metric) if baseline is not None and baseline != row else {}
    return ScoreCell(
        summarise(list(values.values()), ddof),
        compare(values, against) if against and not metric.startswith(PREFIX) else None,
        # An empty cell is one gap, not one for each seed.
        [seed for seed in grid.seeds if seed not in values] if values else [],
    )


def mark_best(table: ScoreTable) -> None:
    """Mark best and second of each column, by the rounded means, so that means that read the same share a mark."""
    for number, column in enumerate(table.columns):
        cells = [row.cells[number] for row in table.rows if row.cells[number].summary is not None and not row.is_given]
        if column.better is None or len(cells) < 2:
            continue
        # Costs never come here, since they have no `better`: their thousands separators are not part of a float.
        shown = {id(cell): float(column.shown(cell.summary.mean)) for cell in cells if cell.summary}
        ranked = sorted(set(shown.values()), reverse=column.better == "higher")
        for cell in cells:
            place = ranked.index(shown[id(cell)])
            cell.mark = ("best", "second")[place] if place < 2 and len(ranked) > 1 else None


def reading(table: ScoreTable, gap: str = GAP, ddof: str | None = None) -> list[str]:
    """Explain how to read the numbers; the same for tables of the same kind."""
    if all(column.spread == "error" for column in table.columns):
        spread = "standard error of the mean over seeds (deviation with ddof 1 over the root of n)"
    else:
        spread = f"standard deviation over seeds ({ddof or f'ddof {table.ddof}'})"
    lines = [f"Mean ± {spread}, n in parentheses; {gap} is a gap, not a zero."]
    if table.baseline is not None and any(cell.paired for row in table.rows for cell in row.cells):
        lines.append(
            f"Δ: mean difference from row {table.baseline} over the seeds that both have, its 95% interval, and p of "
            "the two-sided paired t-test (not corrected for the number of rows)."
        )
    if table.has_paper:
        lines.append("paper: its number (ours − paper).")
    return lines


def mean_text(column: ScoreColumn, cell: ScoreCell) -> str:
    if cell.summary is None:
        return GAP
    spread = cell.summary.error if column.spread == "error" else cell.summary.std
    return column.shown(cell.summary.mean) + (f" ± {column.shown(spread)}" if spread is not None else "")


def paired_text(column: ScoreColumn, cell: ScoreCell) -> str:
    if cell.paired is None:
        return ""
    text = f"Δ {column.signed(cell.paired.difference)}"
    if cell.paired.interval is not None:
        low, high = cell.paired.interval
        text += f" [{column.signed(low)}, {column.signed(high)}]"
    return text if cell.paired.p is None else f"{text} {p_text(cell.paired.p)}"


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def paper_text(column: ScoreColumn, cell: ScoreCell) -> str:
    if cell.paper is None:
        return ""
    mean, std = cell.paper
    text = f"{mean:.{column.digits}f}" + (f" ± {std:.{column.digits}f}" if std is not None else "")
    if cell.summary is not None:
        text += f" ({cell.summary.mean * column.scale - mean:+z.{column.digits}f})"
    return text


def as_shown(table: ScoreTable, *, names_baseline: bool = True) -> Table:
    """Return the table for people: for each measure its mean, the difference to the baseline, the paper's number."""
    header, rows = [table.row_name], []
    for row in table.rows:
        is_named = names_baseline and row.is_baseline and row.label != "Baseline"
        rows.append([Entry(row.label, " (baseline)" if is_named else "")])
    for number, column in enumerate(table.columns):
        cells = [row.cells[number] for row in table.rows]
        header.append(column.label)
        for entries, cell in zip(rows, cells, strict=True):
            count = f" ({cell.summary.n})" if cell.summary else ""
            entries.append(Entry(mean_text(column, cell), count, cell.mark, is_number=True))
        if any(cell.paired for cell in cells):
            header.append(f"Δ to {table.baseline}")
            for entries, cell in zip(rows, cells, strict=True):
                entries.append(Entry(paired_text(column, cell)))
        if table.has_paper:
            header.append("paper (ours − paper)")
            for entries, cell in zip(rows, cells, strict=True):
                entries.append(Entry(paper_text(column, cell)))
    return Table(table.title, header, rows, [*reading(table), *table.notes])


def to_dict(table: ScoreTable) -> dict[str, Any]:
    return {
        "title": table.title,
        "rows_by": table.row_name,
        "seeds": table.seeds,
        "ddof": table.ddof,
        "baseline": table.baseline,
        "columns": [
            {
                "name": column.name,
                "label": column.label,
                "unit": "%" if column.percent else None,
                "better": column.better,
                "spread": column.spread,
            }
            for column in table.columns
        ],
        "rows": [
            {
                "row": row.label,
                "cells": {
                    column.name: _cell_to_dict(column, cell, table.ddof)
                    for column, cell in zip(table.columns, row.cells, strict=True)
                },
            }
            for row in table.rows
        ],
        "notes": [*reading(table), *table.notes],
    }


def _cell_to_dict(column: ScoreColumn, cell: ScoreCell, ddof: int) -> dict[str, Any]:
    """Return plain values in the shown unit; None where there is no number."""
    scale, summary, paired = column.scale, cell.summary, cell.paired
    values: dict[str, Any] = {
        "mean": _scaled(summary.mean, scale) if summary else None,
        "std": _scaled(summary.std, scale) if summary else None,
        "ddof": ddof,
        "standard_error": _scaled(summary.error, scale) if summary else None,
        "n": summary.n if summary else 0,
        "interval": [bound * scale for bound in summary.interval] if summary and summary.interval else None,
        "missing_seeds": cell.missing,
        "mark": cell.mark,
        "paired": None,
        "paper": None,
    }
    if paired is not None:
        interval = [bound * scale for bound in paired.interval] if paired.interval else None
        values["paired"] = {
            "difference": paired.difference * scale,
            "n": paired.n,
            "interval": interval,
            "p": paired.p,
        }
    if cell.paper is not None:
        mean, std = cell.paper
        ours_minus_paper = summary.mean * scale - mean if summary else None
        values["paper"] = {"mean": mean, "std": std, "ours_minus_paper": ours_minus_paper}
    return values


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


CSV_HEADER = (
    *("table", "row", "measure", "unit", "mean", "std", "ddof", "n", "interval_low", "interval_high"),
    *("difference", "pairs", "difference_low", "difference_high", "p", "paper_mean", "paper_std", "ours_minus_paper"),
    *("missing_seeds", "standard_error"),
)


def _csv_rows(tables: Sequence[ScoreTable]) -> Iterator[list[Any]]:
    """Yield one cell a line, in the shown unit."""
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                values = _cell_to_dict(column, cell, table.ddof)
                paired, paper = values["paired"] or {}, values["paper"] or {}
                yield [
                    *(table.title, row.label, column.name, "%" if column.percent else ""),
                    *(
                        values["mean"],
                        values["std"],
                        values["ddof"],
                        values["n"],
                        *(values["interval"] or (None, None)),
                    ),
                    *(paired.get("difference"), paired.get("n")),
                    *(*(paired.get("interval") or (None, None)), paired.get("p")),
                    *(paper.get("mean"), paper.get("std"), paper.get("ours_minus_paper")),
                    *(" ".join(cell.missing), values["standard_error"]),
                ]


#: The formats of `lap report --format`, except the page and its figures.
FORMATS: dict[str, Callable[[Sequence[ScoreTable]], str]] = {
    "table": lambda tables: "\n\n".join(to_text(as_shown(table)) for table in tables),
    "markdown": lambda tables: "\n\n".join(to_markdown(as_shown(table)) for table in tables),
    "latex": lambda tables: "\n\n".join(to_latex(as_shown(table, names_baseline=False)) for table in tables),
    "csv": lambda tables: to_csv(CSV_HEADER, _csv_rows(tables)).rstrip("\n"),
    "json": lambda tables: json.dumps([to_dict(table) for table in tables], indent=2),
}
