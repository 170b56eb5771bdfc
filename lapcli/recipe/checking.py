"""Checks a recipe and lists all of its problems at once, each with its place and what is expected there.

pydantic validates one key at a time here: on a whole section it skips the checks of combinations as soon as one key
is wrong, and its messages are about Python types, not about recipes.
"""

from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lapcli.recipe.reading import Node, Problem, key_shown, listed, plain, quoted, read_plain
from lapcli.recipe.section import Section, item_section, members, subsection

KeyPath = tuple[str, ...]


def check_recipe(recipe: type[Section], root: Node) -> list[Problem]:
    """Return all problems that keep `root` from being a `recipe`."""
    check = _Check(recipe)
    check.section(recipe, root, ())
    return check.problems


@cache
def _adapter(section: type[Section], name: str) -> TypeAdapter[Any]:
    """Return a validator for one key on its own, with the settings of its section."""
    field = section.model_fields[name]
    if subsection(field):
        return TypeAdapter(cast(Any, field.annotation))  # a section brings its own config
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


class _Check:
    def __init__(self, recipe: type[Section]) -> None:
        self.recipe = recipe
        self.problems: list[Problem] = []

    def section(self, section: type[Section], node: Node, path: KeyPath) -> Section | None:
        """Add the problems of a section. If every key is valid on its own, return the section, so that conflicts with
        keys of other sections are found too."""
        if not isinstance(node.value, dict):
            first = next(iter(section.model_fields))
            self._add(node, path, f"expected keys under it, such as `{first}:`, got {quoted(plain(node))}")
            return None
        given = self._known_keys(section, node.value, path)
        values: dict[str, Any] = {}
        for name, (written, child) in given.items():
            self._key(section, name, child, (*path, written), values)
        for name, field in section.model_fields.items():
            if name not in given and field.is_required():
                self._add(node, (*path, name), _missing(field))
            elif name not in given:
                values[name] = field.get_default(call_default_factory=True)
        self._combinations(section, node, path, given, values)
        is_complete = len(values) == len(section.model_fields) and len(given) == len(node.value)
        return section.model_construct(**values) if is_complete else None

    def _add(self, node: Node, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(node.where, ".".join(map(key_shown, path)), message))

    def _known_keys(
        self, section: type[Section], entries: dict[str, Node], path: KeyPath
    ) -> dict[str, tuple[str, Node]]:
        """Map keys to their spelling and value in the file; a clear misspelling is reported, then checked as meant."""
        given = {name: (name, node) for name, node in entries.items() if name in section.model_fields}
        for written, node in entries.items():
            if written in section.model_fields:
                continue
            self._add(node, (*path, written), unknown_key(written, section, self.recipe))
            meant = misspelt(written, section)
            if meant and meant not in given:
                given[meant] = (written, node)
        return given

    def _key(self, section: type[Section], name: str, node: Node, path: KeyPath, values: dict[str, Any]) -> None:
        """Check one key, and add it to `values` if it is valid."""
        field = section.model_fields[name]
        inner = subsection(field)
        try:
            values[name] = _adapter(section, name).validate_python(plain(node))
        except ValidationError as error:
            items = item_section(field)
            if inner:
                if (known := self.section(inner, node, path)) is not None:
                    values[name] = known
            elif items and isinstance(node.value, list) and node.value:
                for number, item in enumerate(node.value):
                    self.section(items, item, (*path[:-1], f"{path[-1]}[{number}]"))
            elif is_choice_of_forms(field):
                self._add(node, path, f"{any_form(field)}, got {quoted(plain(node))}")
            else:
                self._wrong_value(error, field, node, path)

    def _wrong_value(self, error: ValidationError, field: FieldInfo, node: Node, path: KeyPath) -> None:
        for detail in error.errors(include_url=False, include_input=False):
            place, key = node, path
            for step in detail["loc"]:
                if isinstance(step, int) and isinstance(place.value, list) and step < len(place.value):
                    place, key = place.value[step], (*key[:-1], f"{key[-1]}[{step}]")
                elif isinstance(step, str) and isinstance(place.value, dict) and step in place.value:
                    place, key = place.value[step], (*key, step)
                else:
                    break
            value = plain(place)
            self._add(place, key, f"{expected(detail, field)}, got {quoted(value)}{quotes_hint(detail, value)}")

    def _combinations(
        self,
        section: type[Section],
        node: Node,
        path: KeyPath,
        given: dict[str, tuple[str, Node]],
        values: dict[str, Any],
    ) -> None:
        partial = section.model_construct(**values)
        for keys, check in section.combinations():
            if not all(key in values for key in keys) or not (reason := check(partial)):
                continue
            places = {key: given[key][1].where for key in keys if key in given}
            where = places.get(keys[0]) or next(iter(places.values()), node.where)
            # The other key of a conflict may come from a parent file or from an option.
            others = [f"`{key}` is from {place}" for key, place in places.items() if _source(place) != _source(where)]
            note = f" ({', '.join(others)})" if others else ""
            self._add(Node(None, where), (*path, keys[0]), reason + note)


def _source(where: str) -> str:
    return where.rpartition(":")[0] or where


def _missing(field: FieldInfo) -> str:
    inner = subsection(field)
    if inner is None:
        return "is missing; add it"
    needed = [name for name, key in inner.model_fields.items() if key.is_required()]
    return f"the section is missing; it needs {', '.join(needed)}" if needed else "the section is missing"


def key_paths(section: type[Section], under: KeyPath = ()) -> list[KeyPath]:
    """Return every key that a recipe may have, sections included."""
    paths: list[KeyPath] = []
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


def expected(error: ErrorDetails, field: FieldInfo) -> str:
    """Return the message for one of pydantic's errors on `field`."""
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
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


def is_choice_of_forms(field: FieldInfo) -> bool:
    """Return whether the field is a union, for which pydantic reports an error per branch and a reader wants one."""
    return len(members(field.annotation)) > 1


def any_form(field: FieldInfo) -> str:
    """Describe what a union accepts, by the schema's own description if it has one."""
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
    """Format the bounds of an annotation, such as ` (at least 0)`; lengths of texts are left out."""
    bounds = [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]
    words = [f"{word} {getattr(b, name)}" for b in bounds for name, word in _BOUNDS.items() if hasattr(b, name)]
    return f" ({listed(words, 'and')})" if words else ""
