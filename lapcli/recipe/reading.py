"""Parses YAML text into values that know their file and line, and collects problems on the way.

The text is read from PyYAML's events instead of its constructor: each value keeps its line, the rules for numbers are
ours, tags never reach code that could act on them, and depth, size and aliases are bounded.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lapcli.runtime.errors import UsageError, shortened
from lapcli.runtime.files import open_to_read

MAX_DEPTH = 20
_MAX_VALUES = 10_000  # aliases count as the values they refer to
_MAX_BYTES = 2**20
_QUOTED = 60  # characters of a user's value that a message repeats
_SURROGATE = "holds a lone surrogate (an escape, or a name that is not UTF-8)"
_PRINTED = 50  # a list of ten thousand wrong items is one mistake, not ten thousand lines


@dataclass(frozen=True)
class Problem:
    """An error in a recipe; `where` is file:line or an option (`--set`, `--seed`), `key` is dotted, or empty."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{shown(self.where)}  {shown(self.key)}{': ' if self.key else ''}{self.message}"


def in_reading_order(problems: Sequence[Problem], source: str) -> list[Problem]:
    """Sort problems: the recipe from top to bottom, then the files it extends, then the options."""

    def order(problem: Problem) -> tuple[bool, bool, str, int]:
        file, _, line = problem.where.rpartition(":")
        return problem.where.startswith("--"), file != source, file, int(line) if line.isdecimal() else 0

    return sorted(problems, key=order)


class RecipeError(UsageError):
    """A recipe that cannot be used; its text is printed by the command."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = list(problems)
        count = "1 error" if len(self.problems) == 1 else f"{len(self.problems)} errors"
        lines = [f"{count} in {shortened(shown(source))}; nothing was started."]
        lines += [str(problem) for problem in self.problems[:_PRINTED]]
        if len(self.problems) > _PRINTED:
            lines.append(f"... and {len(self.problems) - _PRINTED} more")
        super().__init__("\n".join(lines))


class Unreadable(Exception):
    """A problem that ends the parsing, since it leaves no keys to check."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def shown(text: str) -> str:
    """Escape a user's text to one line without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def key_shown(key: str) -> str:
    return shown(key if len(key) <= _QUOTED else key[: _QUOTED - 1] + "…")


def quoted(value: Any) -> str:
    """Format a value as in a recipe, cut to a readable length."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = shown(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= _QUOTED else text[: _QUOTED - 1] + "…"


def listed(names: Sequence[str], last: str = "or") -> str:
    """Join names: `a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


# How an unquoted word is read: the core schema of YAML 1.2, with underscores in whole numbers. PyYAML follows YAML 1.1,
# where `3e-4` is text, `no` is false, `010` is eight, `1:30` is ninety and `2024-01-01` is a date.
Scalar = None | bool | int | float | str
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# ASCII: \d would also take the digits of every other script.
_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

# Longer ones stay text, which no number key accepts: Python refuses to read integers beyond 4,300 digits, and a
# whole number must still fit a float.
_LONGEST_NUMBER = 200


def read_plain(text: str) -> Scalar:
    """Return the value of an unquoted word."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


@dataclass(frozen=True)
class Node:
    """A value and the place of its key (in a list: of itself)."""

    value: "Scalar | list[Node] | dict[str, Node]"
    where: str


def plain(node: Node) -> Any:
    """Return the bare value, without places."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def read_file(path: Path) -> tuple[dict[str, Node], list[Problem]]:
    """Read the top level of a recipe file, and the problems that do not prevent reading the rest.

    A file that is not a recipe is never quoted: an `extends` must not reveal the content of other files.
    """
    name = str(path)
    try:
        with open_to_read(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file name"
        raise Unreadable(Problem(name, "", f"cannot be read ({reason}); check the file and its permissions")) from None
    if len(content) > _MAX_BYTES:
        raise Unreadable(Problem(name, "", "is larger than 1 MB, which no recipe is; check the name"))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Unreadable(Problem(f"{name}:{line}", "", "is not UTF-8 text; save the recipe as UTF-8")) from None
    node, problems = read_text(text, lambda line: f"{name}:{line}")
    if node is None or node.value is None:
        raise Unreadable(Problem(name, "", "is empty; a recipe starts with `objective:` or `extends:`"))
    if not isinstance(node.value, dict):
        kind = "a list" if isinstance(node.value, list) else "text"
        raise Unreadable(Problem(node.where, "", f"expected `key: value` lines, got {kind}; is this a recipe?"))
    return node.value, problems


def read_text(text: str, where: Callable[[int], str], under: tuple[str, ...] = ()) -> tuple[Node | None, list[Problem]]:
    """Parse one YAML document; None if it has nothing but comments. `under` is the key that it is the value of."""
    builder = _Builder(where, under)
    try:
        # The pure-Python SafeLoader: its parser keeps its own stack, so that deep nesting reaches our check.
        return builder.document(yaml.parse(text, Loader=yaml.SafeLoader)), builder.problems
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise Unreadable(Problem(where(line), "", f"is not YAML: {_without_quotes(error)}")) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        is_surrogate = "\ud800" <= text[error.position] <= "\udfff"
        reason = _SURROGATE if is_surrogate else "is not YAML: there is a control character; remove it"
        raise Unreadable(Problem(where(line), "", reason)) from None
    except (yaml.YAMLError, ValueError, OverflowError):
        # PyYAML lets these through for impossible escapes ("\UFFFFFFFF") and version numbers.
        raise Unreadable(Problem(where(builder.line), "", "is not YAML: an escape or a directive is wrong")) from None


def _without_quotes(error: yaml.MarkedYAMLError) -> str:
    """Return PyYAML's reason without quotations from the file; punctuation, tabs and token names may stay."""

    def harmless(quote: re.Match[str]) -> str:
        return quote[0] if re.fullmatch(r"'(<[a-z ]+>|\\t|[^\w\s])'", quote[0]) else "..."

    problem = error.problem or "cannot be read"
    reason = re.sub(r"""'[^']*'|"[^"]*\"""", harmless, problem).replace(r"'\t'", "tab")
    next_step = next((step for words, step in _YAML_STEPS.items() if words in problem), "")
    return f"{reason}; {next_step}" if next_step else reason


#: What to do about the commonest words of PyYAML, which say what its parser met.
_YAML_STEPS = {
    r"'\t'": "indent with spaces",
    "mapping values are not allowed": "a colon is missing in the line above, or the indent is wrong",
    "could not find expected ':'": "a colon is missing here or in the line above",
    "<stream end>": "it ends before a bracket or a quote is closed",
    "<block end>": "the indent differs from that of the lines above",
}


class _Builder:
    def __init__(self, where: Callable[[int], str], under: tuple[str, ...]) -> None:
        self.where = where
        self._path = list(under)  # the key that is being read
        self.problems: list[Problem] = []
        self.line = 1
        self._anchors: dict[str, tuple[Node, int] | None] = {}  # None while the anchored value is still being read
        self._count = 0

    def document(self, events: Iterator[yaml.Event]) -> Node | None:
        self._events = events
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._stop(event, "a second document starts here; a recipe is one")
                root = self._node(next(events), 0)
        return root

    def _add(self, where: str, message: str) -> None:
        self.problems.append(Problem(where, ".".join(map(key_shown, self._path)), message))

    def _stop(self, event: yaml.Event, message: str) -> Unreadable:
        return Unreadable(Problem(self._place(event), "", message))

    def _place(self, event: yaml.Event) -> str:
        self.line = event.start_mark.line + 1 if event.start_mark else self.line
        return self.where(self.line)

    def _node(self, event: yaml.Event, depth: int, where: str | None = None) -> Node:
        where = where or self._place(event)
        before = self._count
        self._count += 1
        if depth > MAX_DEPTH:
            raise self._stop(event, f"is nested deeper than {MAX_DEPTH} levels; no recipe is")
        if isinstance(event, yaml.AliasEvent):
            name = event.anchor or ""
            known = self._anchors.get(name)
            if known is None:
                inside = name in self._anchors
                raise self._stop(event, "an alias stands inside its own anchor" if inside else "an alias has no anchor")
            self._bound(event, known[1])
            return Node(known[0].value, where)
        self._bound(event, 0)
        if getattr(event, "tag", None) is not None:
            self._add(self._place(event), "tags (`!name`) are not used in recipes; remove it")
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None
        node = Node(self._value(event, depth), where)
        if anchor is not None:
            self._anchors[anchor] = (node, self._count - before)
        return node

    def _bound(self, event: yaml.Event, more: int) -> None:
        self._count += more
        if self._count > _MAX_VALUES:
            raise self._stop(event, f"holds more than {_MAX_VALUES} values (aliases count in full); no recipe does")

    def _value(self, event: yaml.Event, depth: int) -> "Scalar | list[Node] | dict[str, Node]":
        if isinstance(event, yaml.ScalarEvent):
            # A lone surrogate ("\ud800") cannot be printed or saved again.
            if any("\ud800" <= c <= "\udfff" for c in event.value):
                raise self._stop(event, _SURROGATE)
            return read_plain(event.value) if event.style is None else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(item, depth + 1))
            return items
        return self._mapping(depth)

    def _mapping(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            where = self._place(key)
            if not isinstance(key, yaml.ScalarEvent):
                raise self._stop(key, "a key must be a word")
            name = key.value  # as written: `on`, `1` and `null` are words here
            self._path.append(name)
            self._node(key, depth + 1)  # to check its tag and count it
            value = self._node(next(self._events), depth + 1, where)
            if name in entries:
                self._add(where, f"is given twice (first at {entries[name].where}); keep one")
            entries[name] = value
            self._path.pop()
        return entries
