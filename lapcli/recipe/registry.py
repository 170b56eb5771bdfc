"""The recipe of each objective."""

from lapcli.recipe.schema import BaseRecipe, LanguageModelRecipe
from lapcli.recipe.vision import ClassificationRecipe

RECIPES: dict[str, type[BaseRecipe]] = {
    "language_model": LanguageModelRecipe,
    "classification": ClassificationRecipe,
}
