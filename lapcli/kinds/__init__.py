"""The kinds of training: one module for each, and their registry.

A recipe's `objective` is the name of its kind. Nothing here imports torch before a kind trains or loads something, so
that a wrong name is refused at once.
"""

from collections.abc import Sequence
from pathlib import Path

from lapcli.kinds.kind import Kind, LoadedModel, TrainingStart
from lapcli.recipe import load_recipe
from lapcli.recipe.schema import AnyRecipe
from lapcli.runtime.plugins import Registry

KINDS: Registry[Kind] = Registry(
    "kind",
    {
        "language_model": "lapcli.kinds.language_model:KIND",
        "chat": "lapcli.kinds.chat:KIND",
        "classification": "lapcli.kinds.classification:KIND",
        "self_supervised": "lapcli.kinds.self_supervised:KIND",
    },
)


def kind_of(recipe: AnyRecipe) -> Kind:
    return KINDS[recipe.objective]


def load_recipe_with_data(path: Path, overrides: Sequence[str], data: Path | None) -> AnyRecipe:
    """Load a recipe of any kind; `data` is a local file or folder that replaces its own source."""
    loaded = load_recipe(path, overrides)
    return loaded if data is None else kind_of(loaded).load_with_data(path, overrides, data)


__all__ = ["KINDS", "Kind", "LoadedModel", "TrainingStart", "kind_of", "load_recipe_with_data"]
