"""Schedules of the vision objectives; for self-supervised training also the student's parameter groups, with rates by
depth, decay by name, and backbone and heads clipped separately. Steps count from 0, before the update.

In self-supervised training an epoch is `schedule.epoch_steps` steps, for any number of images.
"""

import math
import re
from functools import partial
from typing import Any

from lapcli.models.dino_vit import StudentTeacher
from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.dino import SelfSupervisedRecipe, SelfSupervisedSchedule
from lapcli.recipe.vision import CosineSchedule


def cosine_multiplier(schedule: CosineSchedule, peak: float, step: int, steps: int, steps_per_epoch: int) -> float:
    """Return timm's cosine: linear from `start_lr` over the warm-up, then the half-cosine of the run to `final_lr`.

    The cosine's time includes the warm-up, so that after it the rate is a little below the peak.
    """
    warmup = schedule.warmup_epochs * steps_per_epoch
    if step < warmup:
        rate = schedule.start_lr + (peak - schedule.start_lr) * step / warmup
    else:
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        rate = schedule.final_lr + (peak - schedule.final_lr) * share
    return rate / peak


_BLOCK = re.compile(r"blocks\.(\d+)\.")


def half_cosine(start: float, end: float, step: int, steps: int) -> float:
    """Return end + (start - end) (1 + cos(pi step / steps)) / 2."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(1.0, step / steps)))


def ramp(start: float, end: float, step: int, length: int) -> float:
    """Interpolate linearly; both ends are reached, `end` first at step length - 1."""
    return end if step >= length - 1 else start + (end - start) * step / (length - 1)


def peak_rate(recipe: SelfSupervisedRecipe) -> float:
    """Return the recipe's rate, with `lr_scaling: sqrt4` times 4 sqrt(batch / 1024)."""
    optimizer = recipe.optimizer
    factor = 4 * math.sqrt(recipe.train.batch / 1024) if optimizer.lr_scaling == "sqrt4" else 1.0
    return optimizer.lr * factor


def rate_multiplier(schedule: SelfSupervisedSchedule, peak: float, step: int, steps: int) -> float:
    """Return the multiplier: from 0 to the peak over the warm-up, then along a half-cosine to `final_lr`."""
    warmup = min(steps, round(schedule.warmup_epochs * schedule.epoch_steps))
    if step < warmup:
        return ramp(0.0, 1.0, step, warmup)  # the first step has a rate of 0: upstream's ramp includes both ends
    # `final_lr` is not scaled with the batch, as upstream.
    return half_cosine(peak, schedule.final_lr, step - warmup, steps - warmup) / peak


def backbone_multiplier(name: str, layers: int, decay: float, patch_multiplier: float) -> float:
    """Return decay^(layers - i) for block i, decay^(layers + 1) for tokens and patch embedding, 1 for the final norm.

    The patch embedding is also multiplied by `patch_multiplier`.
    """
    if block := _BLOCK.match(name):
        return decay ** (layers - int(block[1]))
    if name.startswith("patch_embed."):
        return decay ** (layers + 1) * patch_multiplier
    return decay ** (layers + 1) if name in {"cls_token", "mask_token"} else 1.0


def is_decayed(name: str) -> bool:
    """Return whether a parameter decays: all except biases, norms, LayerScale and the parameters of head operators."""
    # Class and mask token decay: upstream's condition on names does not exempt them, despite its comment.
    return not (name.endswith("bias") or "norm" in name or "gamma" in name or ".operators." in name)


def parameter_groups(recipe: SelfSupervisedRecipe, model: StudentTeacher) -> list[ParameterGroup]:
    """Group by part (block, head, ...), with and without decay; prototypes separately, because they start frozen."""
    settings = recipe.optimizer
    # The weight decay of groups that decay is set for each step by `_at_step`.
    options: dict[str, Any] = {"betas": tuple(settings.betas), "eps": settings.eps, "weight_decay": 0.0}
    groups: dict[str, ParameterGroup] = {}
    for full, parameter in model.trained():
        part, _, name = full.removeprefix("student.").partition(".")
        decayed, prototypes, multiplier, inner = is_decayed(name), name.startswith("prototypes."), 1.0, ""
        if part == "backbone":
            multiplier = backbone_multiplier(name, recipe.model.layers, settings.layer_decay, settings.patch_embed_lr)
            inner = f" block {name.split('.')[1]}" if name.startswith("blocks.") else f" {name.split('.')[0]}"
        label = f"{part}{' prototypes' if prototypes else inner}{'' if decayed else ', no decay'}"
        at_step = partial(_at_step, recipe, decayed, prototypes)
        rate = peak_rate(recipe) * multiplier
        group = ParameterGroup(label, "adamw", rate, {}, dict(options), at_step=at_step, clipped_with=part)
        group = groups.setdefault(label, group)
        group.parameters = {**group.parameters, full: parameter}
    return list(groups.values())


def _at_step(recipe: SelfSupervisedRecipe, decayed: bool, prototypes: bool, step: int) -> dict[str, float]:
    schedule, start, changed = recipe.schedule, recipe.optimizer.weight_decay, {}
    if decayed:
        end = start if schedule.final_weight_decay is None else schedule.final_weight_decay
        changed["weight_decay"] = half_cosine(start, end, step, recipe.steps)
    if prototypes and step < schedule.frozen_epochs * schedule.epoch_steps:
        changed["lr"] = 0.0
    return changed
