"""A recipe from its file: inherit, override, check, and only then build."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.checking import check_recipe
from lapcli.recipe.layering import apply_overrides, read_with_parents
from lapcli.recipe.problems import Problem, RecipeError, Unreadable, in_reading_order, listed, quoted
from lapcli.recipe.reading import Node, plain
from lapcli.recipe.registry import RECIPES
from lapcli.recipe.schema import AnyRecipe


def load_recipe(path: str | Path, overrides: Sequence[str] = (), seed: int | None = None) -> AnyRecipe:
    """Reads, inherits, applies `--set` and `--seed`, and validates; RecipeError lists every problem at once."""
    source = str(path)
    try:
        root, problems = read_with_parents(Path(path))
    except Unreadable as error:
        raise RecipeError(source, [error.problem]) from None
    root, refused = apply_overrides(root, _with_lengths(overrides))
    if seed is not None and isinstance(root.value, dict):
        root = Node({**root.value, "seed": Node(seed, "--seed")}, root.where)
    return _build(source, root, problems + refused)


def _with_lengths(overrides: Sequence[str]) -> list[str]:
    """Steps count before epochs, so that epochs asked for on the command line put a recipe's steps aside."""
    keys = {text.split("=", 1)[0].strip() for text in overrides}
    lengths = [key.removesuffix("epochs") for key in keys if key == "train.epochs" or key.endswith(".train.epochs")]
    return [*(f"{section}steps=null" for section in lengths if f"{section}steps" not in keys), *overrides]


def recipe_from_dict(values: Mapping[str, Any], source: str = "the recipe") -> AnyRecipe:
    """The recipe that `recipe_to_dict` gave; `source` is what errors call it."""
    return _build(source, _node(values, source), [])


def _node(value: Any, where: str) -> Node:
    if isinstance(value, Mapping):
        return Node({str(key): _node(child, where) for key, child in value.items()}, where)
    if isinstance(value, list | tuple):
        return Node([_node(child, where) for child in value], where)
    return Node(value, where)


def _build(source: str, root: Node, problems: list[Problem]) -> AnyRecipe:
    recipe, wrong_objective = _recipe_type(root)
    problems = problems + wrong_objective
    if recipe is not None:
        found = check_recipe(recipe, root)
        problems += [problem for problem in found if not (wrong_objective and problem.key == "objective")]
    if problems or recipe is None:
        raise RecipeError(source, in_reading_order(problems, source))
    try:
        return recipe.model_validate(plain(root))
    except ValidationError as error:  # a rule of the schema that is not a `combination`
        details = error.errors(include_url=False, include_input=False)
        rest = [Problem(root.where, ".".join(map(str, d["loc"])), d["msg"]) for d in details]
        raise RecipeError(source, rest) from None


def _recipe_type(root: Node) -> tuple[type[AnyRecipe] | None, list[Problem]]:
    """The recipe of the objective; for a wrong one, the nearest, so that the rest is checked as well."""
    node = root.value.get("objective") if isinstance(root.value, dict) else None
    value = None if node is None else node.value
    if value == "chat" and isinstance(root.value, dict) and "stage" in root.value:
        return ChatStageRecipe, []  # what a run of one stage keeps
    if isinstance(value, str) and value in RECIPES:
        return RECIPES[value], []
    near = get_close_matches(value, RECIPES, 1) if isinstance(value, str) else []
    guess = near or (list(RECIPES) if len(RECIPES) == 1 else [])
    choices = listed([f"`{name}`" for name in RECIPES])
    if node is None and isinstance(root.value, dict) and "cells" in root.value:
        return None, [Problem(root.where, "cells", "this is a file of `lap sweep`, not a recipe")]
    message = f"is missing; expected {choices}" if node is None else f"expected {choices}, got {quoted(plain(node))}"
    return (RECIPES[guess[0]] if guess else None), [Problem((node or root).where, "objective", message)]
