"""Validates a recipe with pydantic, and converts its errors to problems with a location and the expected value."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lapcli.recipe.reading import Document, KeyPath, Problem, dotted, has_step, listed, quoted, value_at
from lapcli.recipe.section import Conflicts, Section, inner_section, members

S = TypeVar("S", bound=Section)


def check_recipe(schema: type[S], document: Document) -> tuple[S | None, list[Problem]]:
    """Return the recipe, or the problems that prevent it. Conflicting keys are found once every key is valid."""
    try:
        return schema.model_validate(document.values), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    found = dict[KeyPath, Problem]()  # one for each key: a union has an error for each of its forms
    conflicts: list[Problem] = []
    missing, meant = set[KeyPath](), set[KeyPath]()  # keys that are missing; keys that a misspelt one stands for
    for detail in details:
        conflict = detail.get("ctx", {}).get("error")
        if isinstance(conflict, Conflicts):
            conflicts += _conflicts(conflict, detail["loc"], document)
            continue
        path = _path(detail, document.values)
        section, field = _field(schema, path)
        if field is None and (near := misspelt(str(path[-1]), section)):
            meant.add((*path[:-1], near))
        if detail["type"] == "missing":
            missing.add(path)
        message = _message(detail, section, field, value_at(document.values, path), schema, path)
        found.setdefault(path, Problem(document.place(path), dotted(path), message))
    # A key that is misspelt is not missing too.
    return None, [problem for path, problem in found.items() if path not in missing & meant] + conflicts


def _path(detail: ErrorDetails, values: Any) -> KeyPath:
    """Return the path of the key, without what pydantic adds to it for a union: the names of its forms."""
    path = detail["loc"]
    for depth, step in enumerate(path):
        if not has_step(values, step):
            is_missing = detail["type"] == "missing" and depth == len(path) - 1 and isinstance(values, dict)
            return path if is_missing else path[:depth]
        values = values[step]
    return path


def _field(section: type[Section], path: KeyPath) -> tuple[type[Section], FieldInfo | None]:
    """Return the section that contains a key, and the key's field; None for an unknown key."""
    *above, last = [step for step in path if isinstance(step, str)]
    for key in above:
        section = inner_section(section.model_fields[key]) or section
    return section, section.model_fields.get(last)


def _message(
    detail: ErrorDetails,
    section: type[Section],
    field: FieldInfo | None,
    value: Any,
    recipe: type[Section],
    path: KeyPath,
) -> str:
    if field is None:
        return unknown_key(str(path[-1]), section, recipe)
    inner = inner_section(field)
    if detail["type"] == "missing":
        needed = [name for name, key in inner.model_fields.items() if key.is_required()] if inner else []
        if inner is None:
            return "is missing; add it"
        return f"the section is missing; it needs {', '.join(needed)}" if needed else "the section is missing"
    if inner and detail["type"].startswith("model"):
        return f"expected keys under it, such as `{next(iter(inner.model_fields))}:`, got {quoted(value)}"
    if detail["type"] == "value_error":  # of a validator of ours
        return str(detail["ctx"]["error"])
    if field.description:
        return f"expected {field.description}, got {quoted(value)}"
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        choices = [choice for member in members(field.annotation) for choice in get_args(member)]
        return f"expected {listed([f'`{choice}`' for choice in choices])}, got {quoted(value)}"
    words = _EXPECTED.get(detail["type"], "")
    expected = f"expected {words.format(**context)}" if words else detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{expected}, got {quoted(value)}"


def _conflicts(conflicts: Conflicts, path: KeyPath, document: Document) -> Iterator[Problem]:
    for keys, reason in conflicts.found:
        places = {key: place for key in keys if (place := document.places.get((*path, key)))}
        where = places.get(keys[0]) or next(iter(places.values()), document.place(path))
        # The other key of a conflict may come from a parent file or from an option.
        others = [f"`{key}` is from {place}" for key, place in places.items() if _source(place) != _source(where)]
        yield Problem(where, dotted((*path, keys[0])), reason + (f" ({', '.join(others)})" if others else ""))


def _source(where: str) -> str:
    return where.rpartition(":")[0] or where


def key_paths(section: type[Section], under: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return every key that a recipe may have, sections included."""
    paths: list[tuple[str, ...]] = []
    for name, field in section.model_fields.items():
        paths.append((*under, name))
        if inner := inner_section(field):
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


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "keys and values",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length} items",
    "too_long": "a list of at most {max_length} items",
}
