"""The classification objective: groups, losses, precision, and batches that cannot be split."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from image_support import image_recipe
from support import built

from lapcli.data.images.sources import open_images
from lapcli.models.vit import without_decay
from lapcli.objectives.classification import Classification
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.ranks import World

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data():
    return open_images(image_recipe().data, 10)


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy"])
def test_losses_match_timm(data, loss):
    objective = built(Classification, image_recipe(train={"loss": loss}), data, ALONE)
    objective.model.eval()
    images, targets = objective.batch(0, 0)
    assert (targets > 0).sum(dim=1).max() == 2
    logits = objective.model(images)
    if loss == "cross_entropy":
        expected = -(targets * F.log_softmax(logits, dim=1)).sum(dim=1).mean()
    else:
        expected = F.binary_cross_entropy_with_logits(logits, (targets > 0).float())
    torch.testing.assert_close(objective.loss((images, targets)), expected)


def test_decay_is_for_matrices_only(data):
    objective = built(Classification, image_recipe(), data, ALONE)
    weights, rest = objective.parameter_groups()
    assert (weights.options["weight_decay"], rest.options["weight_decay"]) == (0.02, 0.0)
    assert set(rest.parameters) == without_decay(objective.model)
    assert {"pos_embed", "cls_token", "blocks.0.ls1.gamma", "norm.bias"} <= set(rest.parameters)
    assert weights.optimizer == "lamb"
    assert weights.options["max_grad_norm"] == 1.0


def test_bf16_runs_on_the_cpu_on_request(data):
    recipe = image_recipe(train={"precision": "bf16"})
    objective = built(Classification, recipe, data, ALONE)
    images, targets = objective.batch(0, 0)
    seen = []
    objective.model.blocks[0].attn.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    loss = objective.loss((images, targets))
    loss.backward()
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in objective.model.parameters())
    full = built(Classification, image_recipe(), data, ALONE)
    full.model.eval(), objective.model.eval()
    assert objective.loss((images, targets)).item() == pytest.approx(full.loss((images, targets)).item(), rel=0.02)


def test_a_warmup_longer_than_the_run_is_refused_before_the_first_step(data, tmp_path):
    """1,438 training images, 89 steps of 16: an epoch's length is known only then."""
    from support import train_here

    recipe = image_recipe(train={"steps": 12}, schedule={"warmup_epochs": 3.5})
    with pytest.raises(UsageError, match=r"warmup_epochs 3\.5 is 312 steps \(89 an epoch\).*a run of 12 steps"):
        train_here(recipe, tmp_path)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    for warmup, fits in ((0.0, True), (11.9 / 89, True), (12 / 89, False)):
        recipe = image_recipe(train={"steps": 12}, schedule={"warmup_epochs": warmup})
        with contextlib.nullcontext() if fits else pytest.raises(UsageError):
            Classification(recipe).prepare(ALONE, Run(tmp_path, recipe, {}), None)
