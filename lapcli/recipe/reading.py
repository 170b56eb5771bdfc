"""A recipe as data: YAML into plain values with the file and line of each key, and a checked recipe back into values,
which are stored in a run, hashed and compared."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lapcli.runtime.errors import UsageError, shortened

if TYPE_CHECKING:
    from lapcli.recipe.schema import AnyRecipe

_MAX_VALUES = 10_000  # aliases count as the values they refer to
_QUOTED = 60  # characters of a user's value that a message repeats
_PRINTED = 50  # a list of ten thousand wrong items is one mistake, not ten thousand lines


KeyPath = tuple[str | int, ...]  # keys and positions in lists


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
    """A problem that stops parsing, since no keys remain to be checked."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def shown(text: str) -> str:
    """Escape a user's text to one line without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def key_shown(key: str) -> str:
    return shown(key if len(key) <= _QUOTED else key[: _QUOTED - 1] + "…")


def dotted(path: KeyPath) -> str:
    """Format a path: `train.steps`, `validation.prompts[1]`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{key_shown(part)}" for part in path]
    return "".join(parts).removeprefix(".")


def quoted(value: Any) -> str:
    """Format a value as in a recipe, cut to a readable length."""
    if value is None:
        return "nothing (null)"
    text = shown(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= _QUOTED else text[: _QUOTED - 1] + "…"


def listed(names: Sequence[str], last: str = "or") -> str:
    """Join names: `a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


# Parsing of unquoted words: the core schema of YAML 1.2, with underscores in whole numbers. PyYAML follows YAML 1.1,
# where `3e-4` is text, `no` is false, `010` is eight, `1:30` is ninety and `2024-01-01` is a date.
Scalar = None | bool | int | float | str
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# ASCII: \d would also take the digits of every other script.
_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
#: Longer ones stay text: Python refuses integers beyond 4,300 digits, and a whole number must still fit a float.
_LONGEST_NUMBER = 200


def read_plain(text: str) -> Scalar:
    """Return the value of an unquoted word."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def has_step(values: Any, step: str | int) -> bool:
    """Return whether a mapping has a key, or a list a position."""
    keys = values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
    return step in keys


def value_at(values: Any, path: KeyPath) -> Any:
    """Return the value of a key; None if there is none."""
    for step in path:
        values = values[step] if has_step(values, step) else None
    return values


#: A key, and another key of its section that a later file or option replaces it with: two forms of the same setting.
_REPLACED_BY = {"operators": "laplacian_heads", "laplacian_heads": "operators", "steps": "epochs"}


@dataclass(frozen=True)
class Document:
    """Plain values, and the file and line, or the option, of each key and list item by its path."""

    values: Any
    places: dict[KeyPath, str]  # of the root too, under the empty path

    def place(self, path: KeyPath) -> str:
        """Return the location of a key, or of the nearest key above it with a location."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def under(self, above: "Document") -> "Document":
        """Merge mappings key by key; anything else in `above` replaces the value here."""
        return Document(_merged(self.values, above.values), {**self.places, **above.places})


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    kept = {key: value for key, value in below.items() if above.get(_REPLACED_BY.get(key, "")) is None}
    return {**kept, **{key: _merged(kept.get(key), value) for key, value in above.items()}}


def read_file(path: Path) -> tuple[Document, list[Problem]]:
    """Read a recipe file, and the problems that do not prevent reading the rest.

    A file that is not a recipe is never quoted: an `extends` must not reveal the content of other files.
    """
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable(Problem(name, "", "is not UTF-8 text; save the recipe as UTF-8")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file name"
        raise Unreadable(Problem(name, "", f"cannot be read ({reason}); check the file and its permissions")) from None
    document, problems = read_text(text, lambda line: f"{name}:{line}")
    if document is None or document.values is None:
        raise Unreadable(Problem(name, "", "is empty; a recipe starts with `objective:` or `extends:`"))
    if not isinstance(document.values, dict):
        raise Unreadable(Problem(document.place(()), "", "expected `key: value` lines; is this a recipe?"))
    return document, problems


def read_text(text: str, where: Callable[[int], str], under: KeyPath = ()) -> tuple[Document | None, list[Problem]]:
    """Parse one YAML document; None if it contains only comments. `under` is the key whose value it is."""
    reader = _Reader(where)
    try:
        root = yaml.compose(text, Loader=_Loader)
        document = None if root is None else Document(reader.value(root, under), reader.places)
    except RecursionError:
        raise Unreadable(Problem(where(1), "", "is nested too deeply for a recipe")) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two for `"\UFFFFFFFF"` and `%YAML 99...`
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
        raise Unreadable(Problem(where(line + 1), "", "is not YAML; check its quotes, brackets and indent")) from None
    return document, reader.problems


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        return ""  # so that only nodes that a recipe tags have a tag


class _Reader:
    """Turns PyYAML's nodes into values; its constructor, which knows tags and YAML 1.1, is not used."""

    def __init__(self, where: Callable[[int], str]) -> None:
        self.where = where
        self.places: dict[KeyPath, str] = {}
        self.problems: list[Problem] = []
        self._count = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        where = self.where(node.start_mark.line + 1)
        self.places.setdefault(path, where)
        self._count += 1
        if self._count > _MAX_VALUES:
            message = f"holds more than {_MAX_VALUES} values (aliases count in full); no recipe does"
            raise Unreadable(Problem(where, "", message))
        if node.tag:
            self.problems.append(Problem(where, dotted(path), "recipes do not support tags (`!name`); remove the tag"))
        if isinstance(node, yaml.ScalarNode):
            return read_plain(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]
        entries: dict[str, Any] = {}
        for key, child in node.value:
            where, name = self.where(key.start_mark.line + 1), key.value  # as written: `on`, `1` and `null` are words
            if not isinstance(key, yaml.ScalarNode) or key.tag:
                raise Unreadable(Problem(where, "", "a key must be a word"))
            inner = (*path, name)
            if name in entries:
                message = f"is given twice (first at {self.places[inner]}); keep one"
                self.problems.append(Problem(where, dotted(inner), message))
            self.places[inner] = where
            entries[name] = self.value(child, inner)
        return entries


def recipe_to_dict(recipe: "AnyRecipe") -> dict[str, Any]:
    """Return the recipe as plain JSON values, with every default written out."""
    return recipe.model_dump(mode="json")


def recipe_to_yaml(recipe: "AnyRecipe") -> str:
    """Return the text of a recipe file that loads as an equal recipe."""
    return yaml.dump(recipe_to_dict(recipe), Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def recipe_hash(recipe: "AnyRecipe") -> str:
    """Return the sha256 of the recipe's canonical JSON: equal for recipes with the same meaning.

    The path of `init_from` weights does not count, since their sha256 does. The hash names a recipe; `differing_keys`
    decides whether two recipes agree.
    """
    canonical = json.dumps(_in_order(_without_places(recipe_to_dict(recipe))), separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_places(value: Any, key: str = "") -> Any:
    if not isinstance(value, dict):
        return value
    places = ("source", "weights") if key == "init_from" else ()
    return {name: _without_places(inner, name) for name, inner in value.items() if name not in places}


def canonical_json(key: str, value: Any) -> str:
    """Return the value of a dotted key as JSON, the same text for equal values."""
    return json.dumps(_in_order(value, key))


def _in_order(value: Any, key: str = "") -> Any:
    """Sort the keys of a value, except for operators: the first operator gets the last heads."""
    if isinstance(value, Mapping):
        is_ordered = _names_operators(key)
        names = list(value) if is_ordered else sorted(value)
        return {name: _in_order(value[name], "" if is_ordered else name) for name in names}
    if isinstance(value, list):
        return [_in_order(item, key) for item in value]
    return value


def _names_operators(key: str) -> bool:
    return key.rpartition(".")[2] == "operators"


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) for each key that differs; a missing key counts as null.

    Operators in another order differ too.
    """
    return list(_differences("", old, new))


def _differences(key: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if _names_operators(key) and old == new and canonical_json(key, old) != canonical_json(key, new):
        return [(key, old, new)]
    if not (isinstance(old, Mapping | None) and isinstance(new, Mapping | None)) or (old is None and new is None):
        return [] if old == new else [(key, old, new)]
    old, new = old or {}, new or {}
    rows: list[tuple[str, Any, Any]] = []
    for name in dict.fromkeys((*old, *new)):
        rows += _differences(f"{key}.{name}" if key else name, old.get(name), new.get(name))
    return rows


class _RecipeDumper(yaml.SafeDumper):
    """Quotes text that our reader would parse as a number, and never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML would also leave line breaks of other scripts (U+0085, U+2028) bare, and read them back as spaces.
    style = None if text.isprintable() and isinstance(read_plain(text), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_RecipeDumper.add_representer(str, _represent_text)
