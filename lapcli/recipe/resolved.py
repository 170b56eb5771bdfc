"""A checked recipe as data: stored in a run, identified by its hash, compared with another."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import yaml

from lapcli.recipe.reading import read_plain
from lapcli.recipe.schema import AnyRecipe


def recipe_to_dict(recipe: AnyRecipe) -> dict[str, Any]:
    """Return the recipe as plain JSON values, with every default written out."""
    return recipe.model_dump(mode="json")


def recipe_to_yaml(recipe: AnyRecipe) -> str:
    """Return the text of a recipe file that loads as an equal recipe."""
    return yaml.dump(recipe_to_dict(recipe), Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def recipe_hash(recipe: AnyRecipe) -> str:
    """Return the sha256 of the recipe's canonical JSON: equal for recipes that mean the same, however they are written.

    Where the weights of `init_from` are does not count, since their own sha256 does. The hash names a recipe; whether
    two recipes agree is decided by `differing_keys`.
    """
    canonical = json.dumps(_in_order(_without_places(recipe_to_dict(recipe))), separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_places(value: Any, key: str = "") -> Any:
    if not isinstance(value, dict):
        return value
    places = ("source", "weights") if key == "init_from" else ()
    return {name: _without_places(inner, name) for name, inner in value.items() if name not in places}


def canonical_json(key: str, value: Any) -> str:
    """Return the value of a dotted key as JSON, the same text for values that mean the same."""
    return json.dumps(_in_order(value, key))


def _in_order(value: Any, key: str = "") -> Any:
    """Sort the keys of a value, except for operators: the one that is named first gets the last heads."""
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
