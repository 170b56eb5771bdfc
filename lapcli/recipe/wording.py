"""What a key expects, in plain words instead of pydantic's."""

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lapcli.recipe.problems import listed
from lapcli.recipe.scalars import read_plain
from lapcli.recipe.section import Section, members

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


def expected(error: ErrorDetails, field: FieldInfo) -> str:
    """The words for one of pydantic's errors on `field`."""
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        return "expected " + listed([form for member in members(field.annotation) for form in _forms(member)])
    if words := _BY_ERROR.get(error["type"]):
        return "expected " + words.format(**context)
    if error["type"] == "value_error":
        return str(context.get("error", error["msg"]))
    return error["msg"][:1].lower() + error["msg"][1:]


def quotes_hint(error: ErrorDetails, value: Any) -> str:
    """Quotes are what makes a number text, and are easily forgotten or one too many."""
    if error["type"] == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if error["type"] in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "" if isinstance(read_plain(value), str | None) else "; remove the quotes"
    return ""


def is_choice_of_forms(field: FieldInfo) -> bool:
    """A union; pydantic reports one error for each of its branches, a reader wants one for all."""
    return len(members(field.annotation)) > 1


def any_form(field: FieldInfo) -> str:
    """What a union accepts; its own description if the schema gives one."""
    return "expected " + (field.description or describe(field.annotation))


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
    """` (at least 0)`, from the bounds in an annotation; lengths of texts go without saying."""
    bounds = [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]
    words = [f"{word} {getattr(b, name)}" for b in bounds for name, word in _BOUNDS.items() if hasattr(b, name)]
    return f" ({listed(words, 'and')})" if words else ""
