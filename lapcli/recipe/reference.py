"""The reference of recipe keys: type, default and meaning, read from the schema and the comments beside its keys."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lapcli.recipe.loading import OBJECTIVES
from lapcli.recipe.section import Section, inner_section, members

#: A limit from here on only catches typos and is omitted.
_ONLY_AGAINST_TYPOS = 10**5
SECTION = "section"


@dataclass(frozen=True)
class Key:
    path: str  # train.micro_batch
    type: str
    default: str  # `required` if it has none
    meaning: str
    objectives: tuple[str, ...]  # of the recipes that have it so

    @property
    def is_section(self) -> bool:
        return self.type == SECTION

    def __str__(self) -> str:
        default = self.default if self.default == "required" else f"default {self.default}"
        return f"{self.path}: {self.type}; {default}; {self.meaning} [{', '.join(self.objectives)}]"


@cache
def reference() -> tuple[Key, ...]:
    """Return every key of every built-in objective; keys that are the same in several are listed once."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for objective in OBJECTIVES.built_in():
        for facts in _keys(OBJECTIVES[objective]):
            found.setdefault(facts, []).append(objective)
    return tuple(Key(*facts, tuple(objectives)) for facts, objectives in found.items())


def find_keys(name: str) -> list[Key]:
    """Return the lines of a key, of all keys of a section, or of all keys that end with the name."""
    keys = [key for key in reference() if not key.is_section]
    return (
        [key for key in keys if key.path == name]
        or [key for key in keys if key.path.startswith(f"{name}.")]
        or [key for key in keys if key.path.endswith(f".{name}")]
    )


def nearest_key(name: str) -> str | None:
    """Return the key that a name misspells."""
    paths = dict.fromkeys(key.path for key in reference())
    ends = {path.rpartition(".")[2]: path for path in reversed(paths)}
    near = get_close_matches(name, [*paths, *ends], 1, cutoff=0.7)
    return ends.get(near[0], near[0]) if near else None


def _keys(schema: type[Section], under: str = "") -> Iterator[tuple[str, str, str, str]]:
    seen: dict[type[Section], str] = {}
    for name, field in schema.model_fields.items():
        path, inner = f"{under}{name}", inner_section(field)
        is_list = inner is not None and get_origin(members(field.annotation)[0]) is list
        kind = "list of sections" if is_list else SECTION if inner else type_of(field)
        twin = seen.get(inner) if inner else None
        meaning = _meaning(schema, name) + (f"; the keys of `{twin}`" if twin else "")
        yield path, kind, default_of(field, inner), meaning
        if inner and not twin:
            seen[inner] = path
            yield from _keys(inner, f"{path}.")


def type_of(field: FieldInfo) -> str:
    """Describe the values of a key; a description in the schema wins."""
    return field.description or _described(field.annotation, field.metadata)


def _described(annotation: Any, limits: Any = ()) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        flat = [limit for each in inner for limit in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return _described(annotation, [*limits, *flat])
    forms = members(annotation)
    if len(forms) > 1 or forms[0] is not annotation:
        texts = [_described(form, limits) for form in forms]
        return " or ".join(texts) + (" or null" if type(None) in get_args(annotation) else "")
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is list:
        length = next((limit.max_length for limit in limits if getattr(limit, "max_length", 9) < 9), None)
        return f"list of {length or 'any number'}: {_described(get_args(annotation)[0])}"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "keys and values"}
    return names.get(get_origin(annotation) or annotation, "section") + _range(limits)


def _range(limits: Any) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = {key: getattr(limit, key) for key in words for limit in limits if getattr(limit, key, None) is not None}
    shown = [f"{words[key]} {bound:g}" for key, bound in bounds.items() if abs(bound) < _ONLY_AGAINST_TYPOS]
    return f" ({', '.join(shown)})" if shown else ""


def default_of(field: FieldInfo, inner: type[Section] | None) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if inner is not None and value is not None and value != []:
        return "its keys' defaults"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


@cache
def _comments(section: type[Section]) -> dict[str, str]:
    """Return the comments of each key of a class, above the key and on its line."""
    found, above = dict[str, str](), list[str]()
    for line in map(str.strip, inspect.getsource(section).splitlines()):
        if line.startswith("#"):
            above.append(line.lstrip("#: "))
            continue
        if key := re.match(r"(\w+): ", line):
            found[key[1]] = " ".join([*above, line.partition("  # ")[2]]).strip()
        above = []
    return found


def _meaning(schema: type[Section], name: str) -> str:
    """Return the comment beside a key, of the nearest class that has one; for a section, the first line about it."""
    for parent in schema.__mro__:
        if issubclass(parent, Section) and parent is not Section and (text := _comments(parent).get(name)):
            return text
    inner = inner_section(schema.model_fields[name])
    parents = [] if inner is None else [each for each in inner.__mro__ if issubclass(each, Section)]
    text = next((inspect.cleandoc(vars(each)["__doc__"]) for each in parents if vars(each).get("__doc__")), "")
    return text.split("\n\n")[0].replace("\n", " ")
