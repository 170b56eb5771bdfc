"""Shared output of commands: tables that fit the terminal, sizes and ages, and the question before a removal."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import facts, fitted, terminal_width

__all__ = ["age_text", "confirmed", "facts", "print_json", "size_text", "table", "terminal_width"]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns side by side; where that is wider than the terminal, a short list for each row."""
    return "\n".join(fitted([headers, *rows], width=width))


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
    """Whether the user agrees, by --yes or by an answer in the terminal; UsageError where there is no terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to answer at; use --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
