"""What is wrong with a recipe, all of it at once, each with its place, its key and what is expected."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lapcli.runtime.errors import UsageError

_QUOTED = 60  # characters of a user's value that a message repeats
_PRINTED = 50  # a list of ten thousand wrong items is one mistake, not ten thousand lines


@dataclass(frozen=True)
class Problem:
    """`where` is file:line, or the option (`--set`, `--seed`) that said it; `key` is dotted, or empty for a file."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{shown(self.where)}  {shown(self.key)}{': ' if self.key else ''}{self.message}"


def in_reading_order(problems: Sequence[Problem], source: str) -> list[Problem]:
    """The recipe from top to bottom, then the files it extends, then the options."""

    def order(problem: Problem) -> tuple[bool, bool, str, int]:
        file, _, line = problem.where.rpartition(":")
        return problem.where.startswith("--"), file != source, file, int(line) if line.isdecimal() else 0

    return sorted(problems, key=order)


class RecipeError(UsageError):
    """A recipe that cannot be used; its text is what the command prints."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = list(problems)
        count = "1 error" if len(self.problems) == 1 else f"{len(self.problems)} errors"
        lines = [f"{count} in {shown(source)}; nothing was started."]
        lines += [str(problem) for problem in self.problems[:_PRINTED]]
        if len(self.problems) > _PRINTED:
            lines.append(f"... and {len(self.problems) - _PRINTED} more")
        super().__init__("\n".join(lines))


class Unreadable(Exception):
    """Stops the reading: with this problem there are no keys to check."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def shown(text: str) -> str:
    """Text of a user on one line, with nothing in it that steers a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def key_shown(key: str) -> str:
    return shown(key if len(key) <= _QUOTED else key[: _QUOTED - 1] + "…")


def quoted(value: Any) -> str:
    """A value as the recipe would write it, cut to a readable length."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = shown(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= _QUOTED else text[: _QUOTED - 1] + "…"


def listed(names: Sequence[str], last: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"
