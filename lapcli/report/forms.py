"""Formats report tables as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lapcli.runtime.tables import fitted, wrapped

GAP = "-"


@dataclass(frozen=True)
class Entry:
    """The text of one cell; `after` follows the marked text, such as the (3) in `91.00 ± 1.73 (3)`."""

    text: str
    after: str = ""
    mark: Literal["best", "second"] | None = None


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = ()

    @property
    def has_marks(self) -> bool:
        return any(entry.mark for row in self.rows for entry in row)


def to_text(table: Table, width: int | None = None) -> str:
    marks = {"best": " *", "second": " +", None: ""}
    rows = [[entry.text + entry.after + marks[entry.mark] for entry in row] for row in table.rows]
    legend = ["* best, + second."] if table.has_marks else []
    notes = [line for note in [*legend, *table.notes] for line in wrapped(note, width=width, indent="  ")]
    lines = fitted([list(table.header), *rows], width=width)
    return "\n".join([*wrapped(table.title, width=width), "", *lines, "", *notes])
