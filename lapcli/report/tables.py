"""Tables over seeds: mean, deviation, n, the paired difference from the baseline; and the formats that are printed.

The best mean of a column, by its recorded direction, is bold and the second underlined;
means that look the same are never best. A gap is `-` for people, an empty field in CSV and null in JSON.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lapcli.report.collect import Collection, Grid, RowKey, collect, grids_of
from lapcli.report.statistics import Paired, Summary, compare, summarise
from lapcli.runtime.errors import UsageError, known_names
from lapcli.runtime.tables import fitted, wrapped
from lapcli.same_recipe import HEADS

GAP = "-"

LABELS = {
    "top1": "top-1",
    "top5": "top-5",
    "linear": "linear probe",
    "knn": "k-NN",
    "ade20k": "ADE20K mIoU",
    "arc_easy": "ARC-Easy",
    "arc_challenge": "ARC-Challenge",
    "mmlu": "MMLU",
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
}
_UNITS = {"fraction": (100.0, " (%)"), "bytes": (1e-6, " (MB)")}  # factor to the shown unit, and its name


@dataclass(frozen=True)
class Column:
    name: str
    label: str
    unit: str | None = None
    direction: Literal["higher", "lower"] | None = None
    digits: int = 2
    spread: Literal["std", "error"] = "std"  # the number after the ±

    @property
    def scale(self) -> float:
        return _UNITS.get(self.unit or "", (1.0, ""))[0]

    def shown(self, value: float, sign: str = "") -> str:
        return f"{value * self.scale:{sign}.{self.digits}f}"


@dataclass
class Cell:
    """One score over seeds; without a summary it is a gap."""

    summary: Summary | None = None
    paired: Paired | None = None  # against the baseline row
    mark: Literal["best", "second"] | None = None
    paper: tuple[float, float | None] | None = None  # in the shown unit: mean and ±


@dataclass
class Row:
    label: str
    cells: list[Cell]
    is_baseline: bool = False
    is_given: bool = False  # only in the paper, such as Random


@dataclass
class ScoreTable:
    title: str
    row_name: str
    columns: list[Column]
    rows: list[Row]
    seeds: list[str]
    notes: list[str] = field(default_factory=list)
    baseline: str | None = None
    has_paper: bool = False

    @property
    def has_numbers(self) -> bool:
        return any(cell.summary for row in self.rows for cell in row.cells)


@dataclass
class Report:
    collection: Collection
    grids: list[Grid]
    tables: list[ScoreTable]
    notes: list[str]


def report_on(
    names: Sequence[str],
    runs_dir: Path,
    *,
    rows: Sequence[str] = (HEADS,),
    columns: Sequence[str] | None = None,
) -> Report:
    """Make a table for each grid of the runs."""
    collection = collect(names, runs_dir)
    notes = collection.notes
    grids = grids_of(collection, rows)
    tables = []
    row_name = ", ".join("Laplacian heads" if key == HEADS else key for key in rows)
    for grid, measures in zip(grids, _columns(grids, columns), strict=True):
        if measures:
            tables.append(table_of(grid, measures, row_name))
    return Report(collection, grids, tables, notes)


def row_keys(paper: str | None, format_: str, rows: str, columns: str | None) -> list[str]:
    """Return the keys of the rows; UsageError for options that cannot be combined."""
    if paper is not None and (columns or rows != HEADS):
        raise UsageError("--paper has the paper's rows and columns; leave out --rows and --columns")
    if paper is not None and format_ == "html":
        raise UsageError("the html page has all three of the paper's tables; leave out --paper")
    return names_in("--rows", rows)


def names_in(option: str, text: str) -> list[str]:
    """Split a comma-separated list of names, without duplicates."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(names):
        raise UsageError(f"{option} takes comma-separated names, got {text[:60]!r}")
    return names


def _columns(grids: Sequence[Grid], asked: Sequence[str] | None) -> list[list[str]]:
    """Return the columns of each grid, without measures that its kind of run cannot have."""
    if asked is None:
        return [_default(grid) for grid in grids]
    chosen: list[list[str]] = [[] for _ in grids]
    for name in asked:
        found = [resolve(name, grid.measures()) for grid in grids]
        having = {grid.first.objective for grid, names in zip(grids, found, strict=True) if names}
        # A known score that is not measured yet is a column of gaps, not a typo.
        if not having and name not in LABELS:
            listed = list(dict.fromkeys(name for grid in grids for name in grid.measures()))
            raise UsageError(f"--columns: no run has a number {name[:60]!r}{known_names(name, listed)}")
        for grid, names, columns in zip(grids, found, chosen, strict=True):
            if not having or grid.first.objective in having:
                columns += [full for full in names or [name] if full not in columns]
    return chosen


def resolve(name: str, available: Sequence[str]) -> list[str]:
    """Return a measure's full names: `k_0.99` is `spectrum.k_0.99`, `arc_easy` also `arc_easy [limit 100]`."""
    for key in (
        lambda full: full,
        lambda full: full.split(" [")[0],
        lambda full: full.split(" [")[0].split(".", 1)[-1],
    ):
        if matches := [full for full in available if key(full) == name]:
            return matches
    return []


def _default(grid: Grid) -> list[str]:
    """Return what `lap eval` measured under the default conditions, in the order of the tasks; else under others; else
    the validation of the training. A grid without any number shows a column of gaps."""
    known = grid.frame[grid.frame["task"] != "training"]["measure"]
    names = [name for name in dict.fromkeys(known) if "." not in name.split(" [")[0]]
    evaluated = [name for name in names if not name.startswith("validation_")]
    order = list(LABELS)
    shown = sorted(
        [name for name in evaluated if " [" not in name] or evaluated,
        key=lambda name: order.index(name) if name in order else len(order),
    )
    return shown or names or list(grid.first.run.recipe.metrics)[:1]


def column_of(name: str, grid: Grid | None = None) -> Column:
    """Return the column of a measure, by the recorded unit and direction of the grid's numbers."""
    about = None if grid is None else grid.about(name)
    unit, direction = (None, None) if about is None else (about["unit"], about["direction"])
    if about is None and grid is not None:  # a column of gaps
        unit, direction = grid.first.run.recipe.metrics.get(name, (None, None))
        unit = "fraction" if name in LABELS else unit
    task, bracket, rest = name.partition(" [")
    short = task.removeprefix("validation_")
    label = ("validation " if short != task else "") + LABELS.get(short, short.split(".", 1)[-1].replace("_", " "))
    digits = 2 if unit == "fraction" else 0 if unit == "bytes" else 4 if unit else 3
    if about is not None and unit is None and abs(about["value"]) >= 10:
        digits = 1
    label += _UNITS.get(unit or "", (1, ""))[1] + (f" [{rest}" if bracket else "")
    return Column(name, label, unit, direction, digits)


def table_of(grid: Grid, measures: Sequence[str], row_name: str) -> ScoreTable:
    """Make the table of a grid: a row for each value, a column for each measure."""
    columns, baseline = [column_of(measure, grid) for measure in measures], grid.baseline
    rows = [
        Row(key.label, [cell_of(grid, key, measure, baseline) for measure in measures], key == baseline)
        for key in grid.rows
    ]
    table = ScoreTable(grid.title, row_name, columns, rows, grid.seeds, baseline=baseline.label if baseline else None)
    mark_best(table)
    return table


def cell_of(grid: Grid, row: RowKey, measure: str, baseline: RowKey | None) -> Cell:
    against = grid.values(baseline, measure) if baseline is not None and baseline != row else {}
    return cell(grid.values(row, measure), against)


def cell(values: dict[str, float], against: dict[str, float]) -> Cell:
    return Cell(summarise(list(values.values())), compare(values, against))


def mark_best(table: ScoreTable) -> None:
    """Mark best and second of each column by the rounded means; a shared best is not marked."""
    for number, column in enumerate(table.columns):
        cells = [row.cells[number] for row in table.rows if not row.is_given]
        shown = {id(cell): float(column.shown(cell.summary.mean)) for cell in cells if cell.summary}
        if column.direction is None or len(set(shown.values())) < 2:
            continue
        ranked = sorted(shown.values(), reverse=column.direction == "higher")
        for cell in cells:
            value = shown.get(id(cell))
            place = ranked.index(value) if value is not None else 2
            is_alone = value is not None and ranked.count(value) == 1
            cell.mark = ("best", "second")[place] if place < 2 and is_alone else None


def reading(table: ScoreTable) -> list[str]:
    """Explain how to read the numbers; the same for tables of the same kind."""
    is_error = all(column.spread == "error" for column in table.columns)
    spread = "standard error of the mean" if is_error else "standard deviation (ddof 1)"
    lines = [f"Mean ± {spread} over seeds, n in parentheses; {GAP} is a gap, not a zero."]
    if any(cell.paired for row in table.rows for cell in row.cells):
        lines.append(
            f"Δ: mean difference from row {table.baseline} over the seeds that both have, its 95% interval, and p of "
            "the two-sided paired t-test (not corrected for the number of rows)."
        )
    return [*lines, *(["paper: its number (ours − paper)."] if table.has_paper else [])]


def mean_text(column: Column, cell: Cell) -> str:
    if cell.summary is None:
        return GAP
    spread = getattr(cell.summary, column.spread)
    return column.shown(cell.summary.mean) + (f" ± {column.shown(spread)}" if spread is not None else "")


def paired_text(column: Column, cell: Cell) -> str:
    if cell.paired is None:
        return ""
    # `z`: a difference that rounds to zero is +0.00, never -0.00.
    text = f"Δ {column.shown(cell.paired.difference, '+z')}"
    if cell.paired.interval is not None and cell.paired.p is not None:
        low, high = (column.shown(end, "+z") for end in cell.paired.interval)
        text += f" [{low}, {high}] " + ("p < 0.001" if cell.paired.p < 0.001 else f"p {cell.paired.p:.3f}")
    return text


def paper_text(column: Column, cell: Cell) -> str:
    if cell.paper is None:
        return ""
    mean, spread = cell.paper
    text = f"{mean:.{column.digits}f}" + (f" ± {spread:.{column.digits}f}" if spread is not None else "")
    return text if cell.summary is None else f"{text} ({cell.summary.mean * column.scale - mean:+z.{column.digits}f})"


def to_text(table: ScoreTable) -> str:
    """Format for a terminal: for each measure its mean, the difference to the baseline, the paper's number."""
    marks = {"best": " *", "second": " +", None: ""}
    header, rows = [table.row_name], []
    for row in table.rows:
        is_named = row.is_baseline and row.label != "Baseline"
        rows.append([row.label + (" (baseline)" if is_named else "")])
    for number, column in enumerate(table.columns):
        cells = [row.cells[number] for row in table.rows]
        header.append(column.label)
        for texts, cell in zip(rows, cells, strict=True):
            count = f" ({cell.summary.n})" if cell.summary else ""
            texts.append(mean_text(column, cell) + count + marks[cell.mark])
        more = [(f"Δ to {table.baseline}", paired_text)] if any(cell.paired for cell in cells) else []
        more += [("paper (ours − paper)", paper_text)] if table.has_paper else []
        for name, text in more:
            header.append(name)
            for texts, cell in zip(rows, cells, strict=True):
                texts.append(text(column, cell))
    is_marked = any(cell.mark for row in table.rows for cell in row.cells)
    notes = [*(["* best, + second."] if is_marked else []), *reading(table), *table.notes]
    below = [line for note in notes for line in wrapped(note, indent="  ")]
    return "\n".join([*wrapped(table.title), "", *fitted([header, *rows]), "", *below])


def to_dict(table: ScoreTable) -> dict[str, Any]:
    return {
        "title": table.title,
        "rows_by": table.row_name,
        "seeds": table.seeds,
        "baseline": table.baseline,
        "columns": [
            {key: getattr(column, key) for key in ("name", "label", "unit", "direction", "spread")}
            for column in table.columns
        ],
        "rows": [
            {
                "row": row.label,
                "cells": {
                    column.name: _cell_to_dict(column, cell)
                    for column, cell in zip(table.columns, row.cells, strict=True)
                },
            }
            for row in table.rows
        ],
        "notes": [*reading(table), *table.notes],
    }


def _cell_to_dict(column: Column, cell: Cell) -> dict[str, Any]:
    """Return plain values in the displayed unit; None for gaps."""

    def scaled(value: float | tuple[float, float] | None) -> Any:
        if isinstance(value, tuple):
            return [end * column.scale for end in value]
        return None if value is None else value * column.scale

    summary, paired, paper = cell.summary, cell.paired, cell.paper
    numbers = {name: scaled(getattr(summary, name, None)) for name in ("mean", "std", "error", "interval")}
    values: dict[str, Any] = {**numbers, "n": summary.n if summary else 0}
    values |= {"mark": cell.mark, "paired": None, "paper": None}
    if paired is not None:
        difference, interval = scaled(paired.difference), scaled(paired.interval)
        values["paired"] = {"difference": difference, "n": paired.n, "interval": interval, "p": paired.p}
    if paper is not None:
        difference = scaled(summary.mean) - paper[0] if summary else None
        values["paper"] = {"mean": paper[0], "std": paper[1], "ours_minus_paper": difference}
    return values


def _csv(tables: Sequence[ScoreTable]) -> str:
    """Return one cell per line, in the displayed unit: the numbers of `to_dict`, nested names joined by a dot."""
    import pandas

    rows = [
        {"table": table.title, "row": row.label, "measure": column.name, **_cell_to_dict(column, cell)}
        for table in tables
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
    ]
    return str(pandas.json_normalize(rows).to_csv(index=False)).rstrip("\n")


#: The formats of `lap report --format`, except the page.
FORMATS: dict[str, Callable[[Sequence[ScoreTable]], str]] = {
    "table": lambda tables: "\n\n".join(to_text(table) for table in tables),
    "csv": _csv,
    "json": lambda tables: json.dumps([to_dict(table) for table in tables], indent=2),
}
