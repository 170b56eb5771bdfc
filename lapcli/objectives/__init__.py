"""The objectives, one class for each training method. This module does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lapcli.recipe.schema import AnyRecipe

if TYPE_CHECKING:
    from lapcli.objectives.objective import Objective


def objective_of(recipe: AnyRecipe) -> "type[Objective[Any]]":
    """Import the class that trains and loads a recipe's models."""
    module, _, name = recipe.implementation.partition(":")
    return getattr(import_module(module), name)
