"""Every problem of a recipe at once: unknown and missing keys, wrong values, combinations that cannot work.

Key by key rather than with one call to pydantic, which stops a section's later checks at its first wrong key.
"""

from functools import cache
from typing import Annotated, Any, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lapcli.recipe.nearest import Path, misspelt, unknown_key
from lapcli.recipe.problems import Problem, key_shown, quoted
from lapcli.recipe.reading import Node, plain
from lapcli.recipe.section import Section, item_section, subsection
from lapcli.recipe.wording import any_form, expected, is_choice_of_forms, quotes_hint


def check_recipe(recipe: type[Section], root: Node) -> list[Problem]:
    """What keeps `root` from being a `recipe`; empty if nothing does."""
    check = _Check(recipe)
    check.section(recipe, root, ())
    return check.problems


@cache
def _adapter(section: type[Section], name: str) -> TypeAdapter[Any]:
    """Checks one key on its own, as its section would."""
    field = section.model_fields[name]
    if subsection(field):
        return TypeAdapter(cast(Any, field.annotation))  # its own settings hold
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


class _Check:
    def __init__(self, recipe: type[Section]) -> None:
        self.recipe = recipe
        self.problems: list[Problem] = []

    def section(self, section: type[Section], node: Node, path: Path) -> None:
        if not isinstance(node.value, dict):
            first = next(iter(section.model_fields))
            self._add(node, path, f"expected keys under it, such as `{first}:`, got {quoted(plain(node))}")
            return
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

    def _add(self, node: Node, path: Path, message: str) -> None:
        self.problems.append(Problem(node.where, ".".join(map(key_shown, path)), message))

    def _known_keys(self, section: type[Section], entries: dict[str, Node], path: Path) -> dict[str, tuple[str, Node]]:
        """Key: how it is written and its value. A clear misspelling is reported, then checked as what it means."""
        given = {name: (name, node) for name, node in entries.items() if name in section.model_fields}
        for written, node in entries.items():
            if written in section.model_fields:
                continue
            self._add(node, (*path, written), unknown_key(written, section, self.recipe))
            meant = misspelt(written, section)
            if meant and meant not in given:
                given[meant] = (written, node)
        return given

    def _key(self, section: type[Section], name: str, node: Node, path: Path, values: dict[str, Any]) -> None:
        """Checks one key; `values` gets it if it is right."""
        field = section.model_fields[name]
        inner = subsection(field)
        try:
            values[name] = _adapter(section, name).validate_python(plain(node))
        except ValidationError as error:
            items = item_section(field)
            if inner:
                self.section(inner, node, path)
            elif items and isinstance(node.value, list) and node.value:
                for number, item in enumerate(node.value):
                    self.section(items, item, (*path[:-1], f"{path[-1]}[{number}]"))
            elif is_choice_of_forms(field):
                self._add(node, path, f"{any_form(field)}, got {quoted(plain(node))}")
            else:
                self._wrong_value(error, field, node, path)

    def _wrong_value(self, error: ValidationError, field: FieldInfo, node: Node, path: Path) -> None:
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
        path: Path,
        given: dict[str, tuple[str, Node]],
        values: dict[str, Any],
    ) -> None:
        partial = section.model_construct(**values)
        for keys, check in section.combinations():
            if not all(key in values for key in keys) or not (reason := check(partial)):
                continue
            places = {key: given[key][1].where for key in keys if key in given}
            where = places.get(keys[0]) or next(iter(places.values()), node.where)
            # The other half of a conflict may stand in a parent file or in an option.
            apart = [f"`{key}` is from {place}" for key, place in places.items() if _source(place) != _source(where)]
            note = f" ({', '.join(apart)})" if apart else ""
            self._add(Node(None, where), (*path, keys[0]), reason + note)


def _source(where: str) -> str:
    return where.rpartition(":")[0] or where


def _missing(field: FieldInfo) -> str:
    inner = subsection(field)
    if inner is None:
        return "is missing; add it"
    needed = [name for name, key in inner.model_fields.items() if key.is_required()]
    return f"the section is missing; it needs {', '.join(needed)}" if needed else "the section is missing"
