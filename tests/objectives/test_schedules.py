"""Schedules and learning-rate multipliers of groups: the paper's by hand, and against timm's scheduler."""

import math

import pytest
import torch
from support import ROOT
from timm.scheduler import CosineLRScheduler

from lapcli.models.dino_vit import StudentTeacher
from lapcli.objectives.language_model import learning_rate_multiplier, muon_momentum
from lapcli.objectives.schedules import cosine_multiplier, parameter_groups, peak_rate, rate_multiplier
from lapcli.recipe import load_recipe
from lapcli.recipe.optimizers import MuonSection
from lapcli.recipe.schema import PlateauSchedule
from lapcli.recipe.vision import CosineSchedule

N = 21_400


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [
        (0, 1.0),
        (17_119, 1.0),
        (17_120, 1.0),  # N - W, the last of the plateau
        (17_121, 4279 / 4280),
        (19_260, 0.5),
        (21_399, 1 / 4280),  # the last update
    ],
)
def test_plateau_then_decay_to_zero(step: int, multiplier: float) -> None:
    assert learning_rate_multiplier(PlateauSchedule(), step, N) == pytest.approx(multiplier, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [(0, 0.1), (9, 1.0), (60, 1.0), (61, 0.9 * 39 / 40 + 0.1), (99, 0.9 / 40 + 0.1)],
)
def test_warmup_and_final_rate(step: int, multiplier: float) -> None:
    schedule = PlateauSchedule(warmup=0.1, warmdown=0.4, final=0.1)
    assert learning_rate_multiplier(schedule, step, 100) == pytest.approx(multiplier, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "momentum"),
    [(0, 0.85), (1, 0.85 + 0.1 / 300), (150, 0.90), (299, 0.95 - 0.1 / 300), (300, 0.95), (N, 0.95)],
)
def test_muon_momentum(step: int, momentum: float) -> None:
    assert muon_momentum(MuonSection(), step) == pytest.approx(momentum, rel=1e-12)


STEPS_PER_EPOCH, EPOCHS = 7, 20
STEPS = STEPS_PER_EPOCH * EPOCHS


def timms(t_initial, warmup, start, final, peak):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    return CosineLRScheduler(optimizer, t_initial, lr_min=final, warmup_t=warmup, warmup_lr_init=start)


@pytest.mark.parametrize(("start", "peak", "final"), [(3e-6, 3e-4, 0.0), (1e-3, 3e-3, 1e-6)])
def test_every_step_matches_timm(start, peak, final):
    schedule = CosineSchedule(warmup_epochs=5, start_lr=start, final_lr=final)
    stock = timms(STEPS, 5 * STEPS_PER_EPOCH, start, final, peak)
    for step in range(STEPS):
        expected = stock._get_lr(step)[0]
        assert peak * cosine_multiplier(schedule, peak, step, STEPS, STEPS_PER_EPOCH) == pytest.approx(expected)
    assert peak * cosine_multiplier(schedule, peak, 0, STEPS, STEPS_PER_EPOCH) == pytest.approx(start)


DINO_STEPS, HALF = 125_000, 62_500


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
        s: 1.5e-3 * rate_multiplier(schedule, 1.5e-3, s, DINO_STEPS) for s in (0, 6250, 12_499, 12_500, 68_750, 124_999)
    }
    assert rates[0] == 0
    assert rates[6250] == pytest.approx(1.5e-3 * 6250 / 12_499)
    assert rates[12_499] == rates[12_500] == pytest.approx(1.5e-3)
    assert rates[68_750] == pytest.approx((1.5e-3 + 1e-6) / 2)  # half of the cosine
    last = 1e-6 + 0.5 * (1.5e-3 - 1e-6) * (1 + math.cos(math.pi * 112_499 / 112_500))
    assert rates[124_999] == pytest.approx(last)


def test_the_alternative_reading_of_the_rate():
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


def test_weight_decay_skips_biases_norms_and_layer_scale(groups):
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


def test_backbone_and_heads_are_clipped_separately(groups):
    sets = {}
    for group in groups:
        for name in group.parameters:
            sets.setdefault(group.clipped_with, set()).add(name.split(".")[1])
    assert sets == {"backbone": {"backbone"}, "dino_head": {"dino_head"}, "ibot_head": {"ibot_head"}}
