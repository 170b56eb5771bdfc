"""What changes with the step, and by how much each parameter follows. Steps count from 0, before the update.

An epoch is `schedule.epoch_steps` steps, whatever the number of images.
"""

import math
import re

from lapcli.recipe.self_supervised import SelfSupervisedRecipe, SelfSupervisedSchedule

_BLOCK = re.compile(r"blocks\.(\d+)\.")


def half_cosine(start: float, end: float, step: int, steps: int) -> float:
    """end + (start - end) (1 + cos(pi step / steps)) / 2"""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(1.0, step / steps)))


def ramp(start: float, end: float, step: int, length: int) -> float:
    """Linear; both ends are taken, `end` for the first time at step length - 1."""
    return end if step >= length - 1 else start + (end - start) * step / (length - 1)


def peak_rate(recipe: SelfSupervisedRecipe) -> float:
    """The recipe's rate, or by `lr_scaling: sqrt4` 4 sqrt(batch / 1024) times that."""
    optimizer = recipe.optimizer
    factor = 4 * math.sqrt(recipe.train.batch / 1024) if optimizer.lr_scaling == "sqrt4" else 1.0
    return optimizer.lr * factor


def rate_multiplier(schedule: SelfSupervisedSchedule, peak: float, step: int, steps: int) -> float:
    """From 0 to the peak over the warm-up, then along a half-cosine to `final_lr`."""
    warmup = min(steps, round(schedule.warmup_epochs * schedule.epoch_steps))
    if step < warmup:
        return ramp(0.0, 1.0, step, warmup)
    return half_cosine(peak, schedule.final_lr, step - warmup, steps - warmup) / peak


def weight_decay(schedule: SelfSupervisedSchedule, start: float, step: int, steps: int) -> float:
    end = start if schedule.final_weight_decay is None else schedule.final_weight_decay
    return half_cosine(start, end, step, steps)


def teacher_momentum(schedule: SelfSupervisedSchedule, step: int, steps: int) -> float:
    start, end = schedule.teacher_momentum
    return half_cosine(start, end, step, steps)


def teacher_temperature(schedule: SelfSupervisedSchedule, step: int) -> float:
    start, end = schedule.teacher_temperature
    return ramp(start, end, step, round(schedule.teacher_warmup_epochs * schedule.epoch_steps))


def prototypes_are_frozen(schedule: SelfSupervisedSchedule, step: int) -> bool:
    return step < schedule.frozen_epochs * schedule.epoch_steps


def backbone_multiplier(name: str, layers: int, decay: float, patch_multiplier: float) -> float:
    """decay^(layers - i) for block i, decay^(layers + 1) for tokens and patch embedding, 1 for the final norm.

    The patch embedding has `patch_multiplier` on top.
    """
    if found := _BLOCK.match(name):
        return decay ** (layers - int(found[1]))
    if name.startswith("patch_embed."):
        return decay ** (layers + 1) * patch_multiplier
    return decay ** (layers + 1) if name in {"cls_token", "mask_token"} else 1.0


def is_decayed(name: str) -> bool:
    """Not biases, norms and LayerScale; class and mask token and the patch embedding are."""
    return not (name.endswith("bias") or "norm" in name or "gamma" in name)
