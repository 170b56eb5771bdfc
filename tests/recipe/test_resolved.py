"""A recipe as data: round trips, hashes by meaning, and diffs by key."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.recipe import (
    RecipeError,
    differing_keys,
    load_recipe,
    recipe_from_dict,
    recipe_hash,
    recipe_to_dict,
    recipe_to_yaml,
)

SMALL = {
    "objective": "language_model",
    "model": {"layers": 4, "width": 64, "heads": 4},
    "data": {"train": "a.txt"},
    "train": {"batch": 4, "micro_batch": 2, "steps": 10},
}
# Text that YAML can hold: no surrogates; the writer escapes control characters.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)
TRICKY = st.sampled_from(
    ["3e-4", "1e6", ".5", "0o17", "no", "null", "~", "<<", "1_000", "2024-01-01", "- a", "\x85\u2028"]
)


@settings(deadline=None)
@given(
    prompts=st.lists(st.one_of(TEXT, TRICKY), max_size=4),
    column=st.one_of(TEXT, TRICKY),
    lr=st.floats(1e-300, 1e6),
    tokens=st.integers(1, 10**12),
)
def test_round_trip_of_any_value(tmp_path_factory, prompts: list[str], column: str, lr: float, tokens: int) -> None:
    recipe = recipe_from_dict(
        {
            **SMALL,
            "data": {"train": "a.txt", "column": column},
            "optimizer": {"lr": lr},
            "validation": {"prompts": prompts, "tokens": tokens},
        }
    )
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_bytes(recipe_to_yaml(recipe).encode())
    again = load_recipe(path)
    assert again == recipe
    assert again.validation.prompts == prompts  # type: ignore[attr-defined]
    assert recipe_hash(again) == recipe_hash(recipe)


def test_the_hash_depends_only_on_the_meaning(tmp_path: Path, valid: str) -> None:
    (tmp_path / "a.yaml").write_text(valid)
    written_otherwise = valid.replace("3e-4", "0.0003 # slow").replace("steps: 100", "steps: 1e2\n  precision: auto")
    (tmp_path / "b.yaml").write_text(written_otherwise)
    same = recipe_hash(load_recipe(tmp_path / "a.yaml"))
    assert len(same) == 64
    assert recipe_hash(load_recipe(tmp_path / "b.yaml")) == same
    assert recipe_hash(load_recipe(tmp_path / "a.yaml", seed=8)) != same


def test_differing_keys() -> None:
    old = {"seed": 1, "model": {"heads": 4, "plan": 5}, "list": [1, 2], "gone": {"a": 1, "b": None}, "same": None}
    new = {"seed": 1, "model": {"heads": 8, "plan": {"layers": 1}}, "list": [1, 3], "new": 2}
    assert differing_keys(old, new) == [
        ("model.heads", 4, 8),
        ("model.plan", 5, {"layers": 1}),
        ("list", [1, 2], [1, 3]),
        ("gone.a", 1, None),
        ("new", None, 2),
    ]
    assert differing_keys(old, old) == []


def test_an_invalid_dict_raises_our_error() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict({**SMALL, "sed": 3, "seed": object()})
    assert {problem.key for problem in caught.value.problems} == {"sed", "seed"}
    assert str(caught.value).startswith("2 errors in the recipe; nothing was started.\n")


def test_the_order_of_operators_matters() -> None:
    """The operator that is named first gets the last heads, so another order is another model."""

    def recipe(operators):
        return recipe_from_dict({**SMALL, "model": {**SMALL["model"], "operators": operators}})

    here, there = {"laplacian": 1, "exclusive": 2}, {"exclusive": 2, "laplacian": 1}
    constants = [{"mix": {"heads": 2, "alpha": 0.5}}, {"mix": {"alpha": 0.5, "heads": 2}}]
    for one, other in [(here, there), ([{}, {}, here, {}], [{}, {}, there, {}])]:
        assert recipe_hash(recipe(one)) != recipe_hash(recipe(other))
        differing = differing_keys(recipe_to_dict(recipe(one)), recipe_to_dict(recipe(other)))
        assert differing == [("model.operators", one, other)]
        assert json.dumps(differing[0][1:]) == json.dumps([one, other])
    assert recipe_hash(recipe(constants[0])) == recipe_hash(recipe(constants[1]))
    assert differing_keys(*(recipe_to_dict(recipe(each)) for each in constants)) == []
