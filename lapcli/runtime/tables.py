"""Text fitted to the terminal: a table that is too wide becomes a list, and lines wrap between words.

In a file or a pipe, and without COLUMNS, lines are as long as they need to be.
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
    return [line for row in rows[1:] for line in _block(rows[0], row, width)]


def _block(headers: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Format a row as its first column, and below it `header text` for the others, as many per line as fit."""
    name = f"{headers[0]} {row[0]}" if row[0][:1].isdigit() else row[0]  # a number alone says nothing
    lines = wrapped(name, width=width, indent="    ") if name else []  # a row without a name continues the one before
    named = len(lines)
    for header, text in zip(headers[1:], row[1:], strict=True):
        pair = f"{header} {text}"
        if not text:
            continue
        if len(lines) > named and len(lines[-1]) + 2 + len(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines += wrapped(pair, "  ", width, indent="    ")
    return lines


def wrapped(text: str, before: str = "", width: int | None = None, indent: str | None = None) -> list[str]:
    """Break text into lines between words, `before` in front of the first; a word longer than a line stays whole.

    `indent` precedes the other lines: by default as many spaces as `before` is long.
    """
    width = max(terminal_width() if width is None else width, 24)
    indent = " " * len(before) if indent is None else indent
    if len(before) + len(text) <= width:
        return [before + text]
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=before,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
        drop_whitespace=True,
    )
    return lines or [before]


def wrapped_message(text: str) -> str:
    """Wrap each line of a message, with its own indentation."""
    lines = [(line[: len(line) - len(line.lstrip())], line.lstrip()) for line in text.splitlines()]
    return "\n".join(part for before, line in lines for part in wrapped(line, before, indent=f"{before}  "))


def facts(rows: Sequence[tuple[str, str]], width: int | None = None) -> str:
    """Format a name and a text per line, long texts wrapped in their column."""
    label = max((len(name) for name, _ in rows), default=0)
    return "\n".join(line for name, text in rows for line in wrapped(text, f"{name.ljust(label)}  ", width))


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as CSV; None becomes an empty field, never a zero."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return text.getvalue()
