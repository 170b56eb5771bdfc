"""What commands print for people: tables that fit the terminal, sizes and ages, and a question before a removal."""

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import aligned

_NO_TERMINAL = 10_000  # columns of a file or a pipe: tables stay tables


def terminal_width() -> int:
    """COLUMNS, else the terminal's; without a terminal as wide as needed."""
    return shutil.get_terminal_size((_NO_TERMINAL, 24)).columns


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns side by side; where that is wider than the terminal, a short list for each row."""
    width = terminal_width() if width is None else width
    lines = aligned([headers, *rows])
    if max(map(len, lines)) <= width:
        return "\n".join(lines)
    return "\n".join(line for row in rows for line in _block(headers, row, width))


def _block(headers: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row as its first column, and below it `header text` for the others, as many a line as fit."""
    lines = [row[0]]
    for header, text in zip(headers[1:], row[1:], strict=True):
        pair = f"{header} {text}"
        if not text:
            continue
        if len(lines) > 1 and len(lines[-1]) + 2 + len(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines += _wrapped(pair, "  ", width)
    return lines


def _wrapped(text: str, before: str, width: int) -> list[str]:
    """Lines broken between words; a word that is longer than a line stays whole."""
    lines = textwrap.wrap(text, max(width - len(before), 20), break_on_hyphens=False, break_long_words=False)
    return [(before if number == 0 else " " * len(before)) + line for number, line in enumerate(lines or [""])]


def facts(rows: Sequence[tuple[str, str]], width: int | None = None) -> str:
    """A name and a text a line, long texts wrapped below themselves."""
    width = terminal_width() if width is None else width
    label = max((len(name) for name, _ in rows), default=0)
    return "\n".join(line for name, text in rows for line in _wrapped(text, f"{name.ljust(label)}  ", width))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def size_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def age_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def confirmed(question: str, yes: bool) -> bool:
    """Whether to go on: by --yes, or by an answer on a terminal. Without either that is a UsageError."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to answer at; say --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
