"""What changes with the step: learning-rate multiplier and Muon's momentum. Steps count from 0, before the update."""

import math

from lapcli.recipe.optimizers import MuonSection
from lapcli.recipe.schema import PlateauSchedule
from lapcli.recipe.vision import CosineSchedule


def learning_rate_multiplier(schedule: PlateauSchedule, step: int, steps: int) -> float:
    """Linear warm-up, a plateau of 1, then linearly down to `final` at the end of the run."""
    warmup, warmdown = round(schedule.warmup * steps), round(schedule.warmdown * steps)
    if step < warmup:
        return (step + 1) / warmup
    if step <= steps - warmdown:
        return 1.0
    left = (steps - step) / warmdown
    return left + (1 - left) * schedule.final


def muon_momentum(optimizer: MuonSection, step: int) -> float:
    if step >= optimizer.momentum_warmup:
        return optimizer.momentum
    share = step / optimizer.momentum_warmup
    return (1 - share) * optimizer.momentum_start + share * optimizer.momentum


def cosine_multiplier(schedule: CosineSchedule, peak: float, step: int, steps: int, steps_per_epoch: int) -> float:
    """timm's cosine: linear from `start_lr` over the warm-up, then the half-cosine of the whole run to `final_lr`.

    The warm-up is the beginning of the cosine's own time, so that after it the rate is a little below the peak.
    """
    time, length, warmup = float(step), float(steps), schedule.warmup_epochs * steps_per_epoch
    if schedule.update == "epoch":  # set after each epoch from its number: the first two have the same rate
        time, length, warmup = max(0, step // steps_per_epoch - 1), steps / steps_per_epoch, schedule.warmup_epochs
    if time < warmup:
        rate = schedule.start_lr + (peak - schedule.start_lr) * time / warmup
    else:
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, time / length)))
        rate = schedule.final_lr + (peak - schedule.final_lr) * share
    return rate / peak
