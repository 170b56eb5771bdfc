"""Schedules and multipliers against the published numbers and values worked out by hand."""

import math

import pytest
import torch
from support import ROOT

from lapcli.models.dino_vit import StudentTeacher
from lapcli.objectives.schedules import (
    parameter_groups,
    peak_rate,
    rate_multiplier,
)
from lapcli.recipe import load_recipe

STEPS, HALF = 125_000, 62_500


def paper(*overrides):
    return load_recipe(ROOT / "recipes/dino_vits.yaml", list(overrides))


@pytest.fixture(scope="module")
def groups():
    recipe = paper("model.head.hidden=8", "model.head.dino_prototypes=4", "model.head.ibot_prototypes=4")
    with torch.device("meta"):
        model = StudentTeacher(recipe.model)
    return parameter_groups(recipe, model)


def test_learning_rate():
    schedule = paper().schedule
    rates = {
        s: 1.5e-3 * rate_multiplier(schedule, 1.5e-3, s, STEPS) for s in (0, 6250, 12_499, 12_500, 68_750, 124_999)
    }
    assert rates[0] == 0
    assert rates[6250] == pytest.approx(1.5e-3 * 6250 / 12_499)
    assert rates[12_499] == rates[12_500] == pytest.approx(1.5e-3)
    assert rates[68_750] == pytest.approx((1.5e-3 + 1e-6) / 2)  # half of the cosine
    last = 1e-6 + 0.5 * (1.5e-3 - 1e-6) * (1 + math.cos(math.pi * 112_499 / 112_500))
    assert rates[124_999] == pytest.approx(last)


def test_the_second_reading_of_the_rate():
    assert peak_rate(paper()) == 1.5e-3
    assert peak_rate(paper("optimizer.lr_scaling=sqrt4")) == pytest.approx(5.61e-3, rel=1e-3)
    assert peak_rate(paper("optimizer.lr_scaling=sqrt4", "optimizer.lr=4.01e-4")) == pytest.approx(1.5e-3, rel=1e-3)


def test_learning_rate_multipliers(groups):
    """0.5133 tokens, 0.1027 patch embedding, 0.540 and 0.95 first and last block, 1 final norm and heads."""
    found = {}
    for group in groups:
        for name in group.parameters:
            found[name.removeprefix("student.")] = group.lr / 1.5e-3
    assert found["backbone.cls_token"] == found["backbone.mask_token"] == pytest.approx(0.5133, abs=5e-5)
    assert found["backbone.patch_embed.proj.weight"] == pytest.approx(0.1027, abs=5e-5)
    assert found["backbone.patch_embed.proj.bias"] == pytest.approx(0.1027, abs=5e-5)
    assert found["backbone.blocks.0.attn.qkv.weight"] == pytest.approx(0.540, abs=5e-4)
    assert found["backbone.blocks.11.mlp.fc2.bias"] == pytest.approx(0.95)
    for name in ("backbone.norm.weight", "dino_head.fc1.weight", "ibot_head.prototypes.weight"):
        assert found[name] == 1


def test_every_student_parameter_is_in_one_group_and_no_teachers(groups):
    names = [name for group in groups for name in group.parameters]
    assert len(names) == len(set(names))
    with torch.device("meta"):
        model = StudentTeacher(paper("model.head.hidden=8").model)
    assert set(names) == {f"student.{name}" for name, _ in model.student.named_parameters()}


def test_weight_decay_passes_over_biases_norms_and_layer_scale(groups):
    for group in groups:
        decay = group.at_step(HALF).get("weight_decay", group.options["weight_decay"])
        for name in group.parameters:
            exempt = name.endswith(("bias", "gamma_1", "gamma_2")) or "norm" in name
            assert decay == (0.0 if exempt else pytest.approx(0.07)), name
    decayed = {name for group in groups if group.at_step(0).get("weight_decay") for name in group.parameters}
    assert {"student.backbone.cls_token", "student.backbone.mask_token"} <= decayed


def test_prototypes_are_frozen_for_one_epoch(groups):
    for group in groups:
        frozen = "prototypes" in next(iter(group.parameters))
        assert (group.at_step(1249).get("lr") == 0.0) == frozen
        assert "lr" not in group.at_step(1250)


def test_backbone_and_heads_are_clipped_apart(groups):
    sets = {}
    for group in groups:
        for name in group.parameters:
            sets.setdefault(group.clipped_with, set()).add(name.split(".")[1])
    assert sets == {"backbone": {"backbone"}, "dino_head": {"dino_head"}, "ibot_head": {"ibot_head"}}
