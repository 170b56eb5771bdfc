"""An optimizer that another package adds: its recipe section, its updates and its state, for the ViT and the GPT."""

import json
from functools import partial
from typing import Annotated, Literal

import pytest
import torch
from image_support import image_recipe
from pydantic import Field
from safetensors.torch import load_file
from support import tiny_recipe, train_here, write_text

from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe import RecipeError, recipe_from_dict, recipe_hash, recipe_to_dict
from lapcli.recipe.optimizers import OptimizerSection
from lapcli.runtime.plugins import Extensions, Origin
from lapcli.training.optimizers import OPTIMIZERS, Optimizer, Optimizers, as_param_groups

STEPS = 10


class HeavyBallSection(OptimizerSection):
    name: Literal["heavy_ball"] = "heavy_ball"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class HeavyBall(Optimizer):
    name = "heavy_ball"
    section = HeavyBallSection

    def build(self, groups):
        return torch.optim.SGD(as_param_groups(groups))

    def new_state(self, p):
        return {"momentum_buffer": torch.zeros_like(p)}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr("lapcli.runtime.plugins._added", {})
    Extensions(Origin("heavy-ball", "1.2")).add("optimizer", HeavyBall())


VIT = {"name": "heavy_ball", "lr": 0.03, "weight_decay": 0.01}


def test_its_section_is_checked_as_any_other():
    recipe = image_recipe(optimizer=VIT)
    assert recipe.optimizer == HeavyBallSection(lr=0.03, weight_decay=0.01)
    again = recipe_from_dict(recipe_to_dict(recipe))
    assert again == recipe
    assert recipe_hash(again) == recipe_hash(recipe)
    with pytest.raises(RecipeError) as error:
        image_recipe(optimizer={**VIT, "momentum": 2, "betas": [0.1, 0.2]}, seed="x")
    assert {(p.key, p.message) for p in error.value.problems} == {
        ("seed", 'expected a whole number, got "x"'),
        ("optimizer.momentum", "expected less than 1.0, got 2"),
        ("optimizer.betas", "unknown key; known here: lr, weight_decay, clip, name, momentum"),
    }


def test_a_name_that_is_not_installed_is_refused_with_those_that_are(tmp_path):
    gpt = partial(tiny_recipe, write_text(tmp_path / "text.txt"))
    for recipe, own in ((image_recipe, "`adamw`, `lamb`"), (gpt, "`muon`, `adamw`, `lamb`")):
        with pytest.raises(RecipeError) as error:
            recipe(optimizer={"name": "heavy_bell", "lr": 0.1})
        assert [p.message for p in error.value.problems] == [f'expected {own} or `heavy_ball`, got "heavy_bell"']


def test_a_state_that_a_plan_counts_is_the_state_that_is_saved():
    for name in OPTIMIZERS:
        p = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16 if name == "heavy_ball" else torch.float32))
        optimizers = Optimizers([ParameterGroup("all", name, 0.1, {"p": p})])
        p.grad = torch.ones_like(p)
        optimizers.step()
        saved = sum(tensor.numel() * tensor.element_size() for tensor in optimizers.state().values())
        assert saved == OPTIMIZERS[name].state_bytes(p), name


def test_a_gpt_is_updated_as_torch_would(tmp_path):
    """All parameters at one rate; AdamW for a GPT is chosen in the same way."""
    from lapcli.models.gpt import GPT
    from lapcli.objectives.language_model import gpt_config, parameter_groups

    for settings, stock in (
        ({"name": "heavy_ball", "lr": 0.1, "weight_decay": 0.3, "momentum": 0.5}, torch.optim.SGD),
        ({"name": "adamw", "lr": 0.1, "weight_decay": 0.3, "betas": [0.5, 0.6]}, torch.optim.AdamW),
    ):
        recipe = tiny_recipe(write_text(tmp_path / "text.txt"), optimizer=settings)
        options = {"momentum": 0.5} if "momentum" in settings else {"betas": (0.5, 0.6), "fused": True}
        ours, theirs = GPT(gpt_config(recipe)), GPT(gpt_config(recipe))
        theirs.load_state_dict(ours.state_dict())
        optimizers = Optimizers(parameter_groups(recipe, ours))
        other = stock(theirs.parameters(), lr=0.05, weight_decay=0.3, **options)
        for step in range(3):
            optimizers.set_learning_rates(0.5)
            for model in (ours, theirs):
                torch.manual_seed(step)
                for p in model.parameters():
                    p.grad = torch.randn_like(p)
            optimizers.step()
            other.step()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q), name


def test_a_run_that_was_cut_off_ends_at_the_same_bits(tmp_path, shared_cache, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    recipe = image_recipe(optimizer=VIT, data={"workers": 0})
    train_here(recipe, tmp_path, "whole")

    update, updates = Optimizers.step, []

    def cut_off(self):
        updates.append(1)
        if len(updates) == 5:
            raise KeyboardInterrupt
        update(self)

    monkeypatch.setattr(Optimizers, "step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        train_here(recipe, tmp_path, "cut")
    monkeypatch.setattr(Optimizers, "step", update)
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["step"] == 4  # validated, and so saved
    train_here(recipe, tmp_path, "cut")
    for file in ("model", "optimizer"):
        one, other = (
            load_file(tmp_path / run / f"checkpoints/step-{STEPS:06d}/{file}.safetensors") for run in ("whole", "cut")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(name.startswith("momentum_buffer/") for name in one)
