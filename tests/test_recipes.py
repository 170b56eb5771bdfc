"""Every shipped recipe is one that loads, and says what it changes."""

import pytest
from support import ROOT

from lapcli.recipe import load_recipe, recipe_to_dict

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_it_loads(path):
    assert load_recipe(path).objective in path.read_text() or "extends:" in path.read_text()


@pytest.mark.parametrize("heads", [0, 1, 3, 5, 7, 9, 10])
def test_the_seven_gpts_differ_in_their_heads_alone(heads):
    path = ROOT / f"recipes/gpt561m_{heads}L.yaml"
    assert len(path.read_text().splitlines()) <= 3
    ours, base = recipe_to_dict(load_recipe(path)), recipe_to_dict(load_recipe(ROOT / "recipes/gpt561m.yaml"))
    assert ours["model"].pop("laplacian_heads") == heads
    base["model"].pop("laplacian_heads")
    assert ours == base


def test_the_quickstart_is_what_the_readme_says():
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    assert (recipe.model.heads, recipe.model.laplacian_heads) == (4, 2)
    assert recipe.data.train == "builtin"
