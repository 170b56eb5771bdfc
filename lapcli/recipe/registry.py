"""The recipe of each objective."""

from lapcli.recipe.chat import ChatRecipe
from lapcli.recipe.schema import AnyRecipe, LanguageModelRecipe
from lapcli.recipe.self_supervised import SelfSupervisedRecipe
from lapcli.recipe.vision import ClassificationRecipe

RECIPES: dict[str, type[AnyRecipe]] = {
    "language_model": LanguageModelRecipe,
    "chat": ChatRecipe,
    "classification": ClassificationRecipe,
    "self_supervised": SelfSupervisedRecipe,
}
