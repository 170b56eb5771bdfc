"""Formats report tables as text, and writes the file that `--out` names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_text
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


def write_for_user(path: Path, text: str) -> None:
    """Write text to the place that a user named with --out."""
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: to be written to, not replaced
            path.write_bytes(text.encode("utf-8"))
        else:
            write_text(path.resolve(), text)  # a link stays, and what it points to is written
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written ({error.strerror}); name another file") from None
