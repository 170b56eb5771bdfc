"""The recipe, which configures a run: loading, inheritance, checks, comparison. It does not import torch."""

from lapcli.recipe.loading import OBJECTIVES, find_recipe, load_recipe, recipe_from_dict, recipe_loader
from lapcli.recipe.reading import (
    Problem,
    RecipeError,
    canonical_json,
    differing_keys,
    recipe_hash,
    recipe_to_dict,
    recipe_to_yaml,
)
from lapcli.recipe.schema import AnyRecipe, BaseRecipe

__all__ = [
    "OBJECTIVES",
    "AnyRecipe",
    "BaseRecipe",
    "Problem",
    "RecipeError",
    "canonical_json",
    "differing_keys",
    "find_recipe",
    "load_recipe",
    "recipe_from_dict",
    "recipe_hash",
    "recipe_loader",
    "recipe_to_dict",
    "recipe_to_yaml",
]
