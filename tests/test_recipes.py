"""Every shipped recipe loads, and every override takes effect."""

import pytest
import yaml
from support import ROOT

from lapcli.recipe import load_recipe, recipe_to_dict

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def leaves(value, key=""):
    """Leaves of plain YAML, with their dotted keys; lists of sections too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner:
        yield key.removeprefix("."), value
    for name, child in inner:
        yield from leaves(child, f"{key}.{name}")


def number(value):
    """YAML 1.1 reads `3e-4` as a string."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_loads_and_keeps_all_its_keys(path):
    written = yaml.safe_load(path.read_text())
    written.pop("extends", None)
    loaded = dict(leaves(recipe_to_dict(load_recipe(path))))
    kept = {key: number(value) for key, value in leaves(written)}
    assert kept
    assert {key: loaded.get(key, "not there") for key in kept} == kept


@pytest.mark.parametrize("heads", [0, 1, 3, 5, 7, 9, 10])
def test_the_seven_gpts_differ_only_in_their_heads(heads):
    path = ROOT / f"recipes/gpt561m_{heads}L.yaml"
    ours, base = recipe_to_dict(load_recipe(path)), recipe_to_dict(load_recipe(ROOT / "recipes/gpt561m.yaml"))
    assert ours["model"].pop("laplacian_heads") == heads
    base["model"].pop("laplacian_heads")
    assert ours == base


def test_the_quickstart_matches_the_readme():
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
    assert (recipe.model.heads, recipe.model.laplacian_heads) == (4, 2)
    assert recipe.data.train == "builtin"
