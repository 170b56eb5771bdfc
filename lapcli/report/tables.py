"""A table of numbers: its cells, which of them are best, and what a cell says in words.

The best mean of a column is bold and the second underlined, as in the paper; means that read the same share their mark.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    spread: Literal["deviation", "error"] = "deviation"  # what stands after the ±

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


def marking(table: Table) -> list[str]:
    """What bold and underlined mean, in the forms that have them."""
    has_marks = any(cell.mark for row in table.rows for cell in row.cells)
    return ["Best in bold, second best underlined."] if has_marks else []


def reading(table: Table, gap: str = GAP, ddof: str | None = None) -> list[str]:
    """How to read it; the same for tables of the same kind."""
    lines = [f"Mean ± {_spread(table, ddof)}, n in parentheses; {gap} is a gap, not a zero."]
    if table.baseline is not None and any(cell.paired for row in table.rows for cell in row.cells):
        lines.append(
            f"Δ: mean difference from row {table.baseline} over the seeds that both have, its 95% interval, and p of "
            "the two-sided paired t-test (not corrected for the number of rows)."
        )
    if table.has_paper:
        lines.append("paper: its number (ours − paper).")
    return lines


def _spread(table: Table, ddof: str | None) -> str:
    if all(column.spread == "error" for column in table.columns):
        return "standard error of the mean over seeds (deviation with ddof 1 over the root of n)"
    return f"standard deviation over seeds ({ddof or f'ddof {table.ddof}'})"


def mean_text(column: Column, cell: Cell, sign: str = "±") -> str:
    if cell.summary is None:
        return GAP
    spread = cell.summary.error if column.spread == "error" else cell.summary.std
    told = f" {sign} {column.shown(spread)}" if spread is not None else ""
    return f"{column.shown(cell.summary.mean)}{told}"


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
