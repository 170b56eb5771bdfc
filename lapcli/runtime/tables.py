"""Text fitted to the terminal: a table that is too wide becomes a list, and lines wrap between words.

In a file or a pipe, and without COLUMNS, lines are not wrapped.
"""

import csv
import io
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format a line for each row, columns as wide as their longest text; those in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if number in right else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_NO_TERMINAL = 10_000  # columns of a file or a pipe


def terminal_width() -> int:
    """Return COLUMNS or the terminal's width; without a terminal there is no limit."""
    return shutil.get_terminal_size((_NO_TERMINAL, 24)).columns


def fitted(rows: Sequence[Sequence[str]], right: Collection[int] = (), width: int | None = None) -> list[str]:
    """Format the lines of a table, its header first; if it is wider than the terminal, a short list for each row."""
    width = terminal_width() if width is None else width
    lines = aligned(rows, right)
    if max(map(len, lines)) <= width:
        return lines
    lines, headers = [], rows[0]
    for row in rows[1:]:
        pairs = [f"{header} {text}" for header, text in zip(headers[1:], row[1:], strict=True) if text]
        # A row without a name continues the previous row; a number alone is not readable.
        name = f"{headers[0]} {row[0]}" if row[0][:1].isdigit() else row[0]
        lines += [*(wrapped(name, width=width) if name else []), *wrapped("  ".join(pairs), "  ", width)]
    return lines


def wrapped(text: str, before: str = "", width: int | None = None, indent: str | None = None) -> list[str]:
    """Break text into lines between words, `before` in front of the first; a word longer than a line is not split.

    `indent` precedes the other lines: by default as many spaces as `before` is long.
    """
    width = max(terminal_width() if width is None else width, 24)
    options: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    indent = " " * len(before) if indent is None else indent
    return textwrap.wrap(text, width, initial_indent=before, subsequent_indent=indent, **options) or [before]


def wrapped_message(text: str) -> str:
    """Wrap each line of a message, with its own indentation."""
    lines = [(line[: len(line) - len(line.lstrip())], line.lstrip()) for line in text.splitlines()]
    return "\n".join(part for before, line in lines for part in wrapped(line, before, indent=f"{before}  "))


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Format a name and a text per line, long texts wrapped in their column."""
    label = max((len(name) for name, _ in rows), default=0)
    return "\n".join(line for name, text in rows for line in wrapped(text, f"{name.ljust(label)}  "))


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as CSV; None becomes an empty field, never a zero."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return text.getvalue()
