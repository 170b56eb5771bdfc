"""Validates a recipe once with pydantic, and turns its errors into problems with a place and what is expected there."""

from collections.abc import Iterator
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lapcli.recipe.reading import Document, KeyPath, Problem, dotted, listed, quoted, read_plain
from lapcli.recipe.section import Conflicts, Section, item_section, members, subsection

S = TypeVar("S", bound=Section)


def check_recipe(schema: type[S], document: Document) -> tuple[S | None, list[Problem]]:
    """Return the recipe, or the problems that prevent it. Keys that conflict are found once every key is valid."""
    try:
        return schema.model_validate(document.values), []
    except ValidationError as error:
        found = dict[KeyPath, Problem]()  # one for each key: a union has an error for each of its forms
        missing, misspelt_keys = set[KeyPath](), set[KeyPath]()
        conflicts: list[Problem] = []
        for detail in error.errors(include_url=False, include_input=False):
            path, section, field = _locate(schema, detail["loc"], document.values)
            conflict = detail.get("ctx", {}).get("error")
            if isinstance(conflict, Conflicts):
                conflicts += _conflicts(conflict, path, document)
            else:
                message = _message(detail, path, section, field, schema, document)
                found.setdefault(path, Problem(document.place(path), dotted(path), message))
                if field is None and section is not None:
                    misspelt_keys.add((*path[:-1], misspelt(str(path[-1]), section) or ""))
                if detail["type"] == "missing" and path == detail["loc"]:
                    missing.add(path)
        # A key that is misspelt is not missing too.
        return None, [found[path] for path in found if path not in missing & misspelt_keys] + conflicts


def _locate(schema: type[Section], loc: KeyPath, values: Any) -> tuple[KeyPath, type[Section] | None, FieldInfo | None]:
    """Follow one of pydantic's locations: return the path of the key, the section that it is in, and its field.

    What pydantic adds to the path of a union, the names of its forms, is left out.
    """
    path: KeyPath = ()
    section: type[Section] | None = schema  # that has the next key
    around, field, items = section, None, None
    for step in loc:
        if section is not None and isinstance(step, str):
            path, around, field = (*path, step), section, section.model_fields.get(step)
            section, items = (subsection(field), item_section(field)) if field else (None, None)
            values = values.get(step) if isinstance(values, dict) else None
            if field is None or (section is None and items is None and len(members(field.annotation)) > 1):
                break
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            path, section, values = (*path, step), items, values[step]
        elif isinstance(values, dict) and step in values:
            path, values = (*path, step), values[step]
        else:
            break
    return path, around, field


def _message(
    detail: ErrorDetails,
    path: KeyPath,
    section: type[Section] | None,
    field: FieldInfo | None,
    schema: type[Section],
    document: Document,
) -> str:
    if detail["type"] == "extra_forbidden" and section is not None and field is None:
        return unknown_key(str(path[-1]), section, schema)
    value: Any = document.values
    for step in path:
        if isinstance(value, list) and isinstance(step, int):
            value = value[step]
        else:
            value = value.get(step) if isinstance(value, dict) else None
    if field is None:
        return expected(detail, field)
    if detail["type"] == "missing" and path == detail["loc"]:
        return _missing(field)
    inner = subsection(field) or item_section(field)
    if inner and detail["type"].startswith("model"):
        return f"expected keys under it, such as `{next(iter(inner.model_fields))}:`, got {quoted(value)}"
    if len(members(field.annotation)) > 1:
        return f"expected {field.description or describe(field.annotation)}, got {quoted(value)}"
    return f"{expected(detail, field)}, got {quoted(value)}{quotes_hint(detail, value)}"


def _conflicts(conflicts: Conflicts, path: KeyPath, document: Document) -> Iterator[Problem]:
    for keys, reason in conflicts.found:
        places = {key: place for key in keys if (place := document.places.get((*path, key)))}
        where = places.get(keys[0]) or next(iter(places.values()), document.place(path))
        # The other key of a conflict may come from a parent file or from an option.
        others = [f"`{key}` is from {place}" for key, place in places.items() if _source(place) != _source(where)]
        yield Problem(where, dotted((*path, keys[0])), reason + (f" ({', '.join(others)})" if others else ""))


def _source(where: str) -> str:
    return where.rpartition(":")[0] or where


def _missing(field: FieldInfo) -> str:
    inner = subsection(field)
    if inner is None:
        return "is missing; add it"
    needed = [name for name, key in inner.model_fields.items() if key.is_required()]
    return f"the section is missing; it needs {', '.join(needed)}" if needed else "the section is missing"


def key_paths(section: type[Section], under: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return every key that a recipe may have, sections included."""
    paths: list[tuple[str, ...]] = []
    for name, field in section.model_fields.items():
        paths.append((*under, name))
        if inner := subsection(field) or item_section(field):
            paths += key_paths(inner, (*under, name))
    return paths


def misspelt(key: str, section: type[Section]) -> str | None:
    """Return the key of this section that `key` misspells by a letter or two."""
    return next(iter(get_close_matches(key, list(section.model_fields), 1, cutoff=0.8)), None)


def unknown_key(key: str, section: type[Section], recipe: type[Section]) -> str:
    """Return the message for a key that its section does not have."""
    if key == "<<":
        return "unknown key; merge keys are not supported, use `extends` or repeat the keys"
    paths = key_paths(recipe)
    if (path := tuple(key.split("."))) in paths and len(path) > 1:
        return f"unknown key; write `{path[-1]}:` in the section `{'.'.join(path[:-1])}:`"
    similar = get_close_matches(key, list(section.model_fields), 1)
    elsewhere = [path for path in paths if path[-1] == key]
    if not elsewhere and not similar:
        close = get_close_matches(key, [path[-1] for path in paths], 1, cutoff=0.7)
        elsewhere = [path for path in paths if path[-1] in close]
    if elsewhere:
        return f"unknown key here; did you mean {listed(['`' + '.'.join(path) + '`' for path in elsewhere])}?"
    if similar:
        return f"unknown key; did you mean `{similar[0]}`?"
    return f"unknown key; known here: {', '.join(section.model_fields)}"


_WORDS: dict[Any, tuple[str, str]] = {  # one, several
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false values"),
    str: ("text", "texts"),
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

_BY_ERROR = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length} items",
    "too_long": "a list of at most {max_length} items",
}


def expected(error: ErrorDetails, field: FieldInfo | None) -> str:
    """Return the message for one of pydantic's errors on `field`."""
    context = error.get("ctx", {})
    if error["type"] == "literal_error" and field is not None:
        return "expected " + listed([form for member in members(field.annotation) for form in _forms(member)])
    if words := _BY_ERROR.get(error["type"]):
        return "expected " + words.format(**context)
    if error["type"] == "value_error":
        return str(context.get("error", error["msg"]))
    return error["msg"][:1].lower() + error["msg"][1:]


def quotes_hint(error: ErrorDetails, value: Any) -> str:
    """Return a hint if the value would be valid with or without quotes, which make a number text."""
    if error["type"] == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if error["type"] in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "" if isinstance(read_plain(value), str | None) else "; remove the quotes"
    return ""


def describe(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        return describe(base) + _range(metadata)
    if get_origin(annotation) in (Union, UnionType):
        return listed([form for member in members(annotation) for form in _forms(member)])
    if get_origin(annotation) is list:
        item = get_args(annotation)[0]
        base, *metadata = get_args(item) if get_origin(item) is Annotated else (item,)
        return f"a list of {_WORDS[base][1] if base in _WORDS else describe(base)}{_range(metadata)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"{{{', '.join(f'{key}:' for key in annotation.model_fields)}}}"
    return _WORDS[annotation][0] if annotation in _WORDS else str(annotation)


def _forms(member: Any) -> list[str]:
    if get_origin(member) is Literal:
        return [f"`{choice}`" for choice in get_args(member)]
    return ["true", "false"] if member is bool else [describe(member)]


def _range(metadata: list[Any]) -> str:
    """Format the bounds of an annotation, such as ` (at least 0)`; lengths of texts are left out."""
    bounds = [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]
    words = [f"{word} {getattr(b, name)}" for b in bounds for name, word in _BOUNDS.items() if hasattr(b, name)]
    return f" ({listed(words, 'and')})" if words else ""
