"""The objective: batches, masks and losses independent of the world size, the teacher's moving average, and the
detection of a collapse."""

import pytest
import torch
from dino_support import WHOLE, dino_recipe, objective
from objectives_support import build
from support import ROOT

from lapcli.recipe import RecipeError, load_recipe
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.errors import UsageError


def by_group(step, processes, micro_batch):
    """{group: its crops, masks and images} for all processes and micro-steps of a step."""
    found = {}
    for rank in range(processes):
        ours = objective(dino_recipe(train={"batch": 16, "micro_batch": micro_batch}), rank, processes)
        for micro_step in range(ours.batches.accumulation):
            batch = ours.batch(step, micro_step)
            first = ours.batches.first(micro_step, rank)
            masks = batch.masks_MP.view(2, batch.images, -1)
            crops = batch.global_MCHW.unflatten(0, (2, batch.images))
            for place in range(0, batch.images, 4):
                part = slice(place, place + 4)
                found[(first + place) // 4] = (masks[:, part], crops[:, part])
    return [found[group] for group in sorted(found)]


@pytest.mark.parametrize(("processes", "micro_batch"), [(1, 4), (2, 8), (4, 4)])
def test_masks_and_crops_of_a_group_do_not_depend_on_the_world_size(processes, micro_batch):
    one, other = by_group(3, 1, 16), by_group(3, processes, micro_batch)
    assert len(one) == len(other) == 4
    for (masks, crops), (other_masks, other_crops) in zip(one, other, strict=True):
        assert torch.equal(masks, other_masks)
        assert torch.equal(crops, other_crops)
    assert not torch.equal(one[0][0], one[1][0])


@pytest.mark.parametrize("stream", ["bf16", "float32"])
def test_student_and_teacher_streams_use_the_recipe_precision(stream, tmp_path):
    """On real bf16: every block output is bf16, and the loss differs from float32 only by bf16 rounding."""
    exact, policy = build("self_supervised", tmp_path), ComputePolicy("cpu", bf16=True)
    rough = build("self_supervised", tmp_path, policy=policy, stream=stream)
    seen = set()
    for network in (rough.model.student, rough.model.teacher):
        for block in network.backbone.blocks:
            block.register_forward_hook(lambda module, given, out: seen.add(out.dtype))
    losses = [each.loss(each.batch(0, 0)) for each in (exact, rough)]
    assert seen == {torch.bfloat16 if stream == "bf16" else torch.float32}
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    losses[1].backward()
    gradients = [p.grad for _, p in rough.model.trained() if p.grad is not None]
    assert gradients
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in gradients)


def test_a_group_cannot_be_split():
    with pytest.raises(RecipeError, match="would cut"):
        dino_recipe(train={"micro_batch": 2})
    with pytest.raises(UsageError, match="shared evenly"):
        objective(dino_recipe(), 0, 4)  # two groups, four processes


def test_the_loss_is_the_weighted_sum_of_its_terms():
    for weights in ({"dino": 1.0, "koleo": 0.1, "ibot": 1.0}, {"dino": 0.5, "koleo": 2.0, "ibot": 3.0}):
        ours = objective(dino_recipe(**{**WHOLE, "train": {**WHOLE["train"], **weights}}))
        loss = float(ours.loss(ours.batch(0, 0)).detach())
        seen = {name: float(value) for name, value in ours.update_metrics().items()}
        dino = (4 * seen["loss_local"] + 2 * seen["loss_global"]) / 6  # 2 local and 2 global crops: 4 and 2 pairs
        parts = weights["dino"] * dino + weights["koleo"] * seen["loss_koleo"] + weights["ibot"] * seen["loss_ibot"]
        assert loss == pytest.approx(parts, rel=1e-5)


def test_only_the_moving_average_updates_the_teacher():
    ours = objective(dino_recipe(**WHOLE))
    teacher, student = ours.model.teacher, ours.model.student
    for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
        assert torch.equal(a, b)
    ours.loss(ours.batch(0, 0)).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in student.parameters())
    before = [p.detach().clone() for p in teacher.parameters()]
    with torch.no_grad():
        for p in student.parameters():
            p.add_(1.0)
    ours.after_step(0)  # momentum 0.9
    for old, new, p in zip(before, teacher.parameters(), student.parameters(), strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * p, atol=1e-6)


def test_the_recipe_matches_the_paper_table():
    recipe = load_recipe(ROOT / "recipes/dino_vits.yaml")
    model, train, data, schedule = recipe.model, recipe.train, recipe.data, recipe.schedule
    assert (model.layers, model.width, model.heads, model.patch, model.rope_base) == (12, 384, 6, 16, 100)
    assert (model.drop_path, model.head.dino_prototypes, model.head.ibot_prototypes) == (0.1, 65_536, 65_536)
    assert (recipe.steps / schedule.epoch_steps, train.group, recipe.optimizer.lr) == (100, 224, 1.5e-3)
    assert (schedule.warmup_epochs, schedule.final_lr, recipe.optimizer.clip) == (10, 1e-6, 3.0)
    assert (recipe.optimizer.weight_decay, schedule.final_weight_decay, recipe.optimizer.layer_decay) == (
        0.04,
        0.1,
        0.95,
    )
    assert (schedule.teacher_momentum, schedule.teacher_temperature) == ([0.992, 1.0], [0.04, 0.07])
    assert (schedule.teacher_warmup_epochs, train.dino, train.koleo, train.ibot) == (30, 1.0, 0.1, 1.0)
    assert (data.masks.probability, data.masks.ratio) == (0.5, [0.1, 0.5])
    crops = data.crops
    assert (crops.global_size, crops.global_scale, crops.locals) == (224, [0.32, 1.0], 8)
    assert (crops.local_size, crops.local_scale) == (96, [0.05, 0.32])
    assert recipe.optimizer.betas == [0.9, 0.999]
