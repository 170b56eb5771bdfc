"""The cosine schedule, against timm's scheduler."""

import pytest
import torch
from timm.scheduler import CosineLRScheduler

from lapcli.objectives.schedules import cosine_multiplier
from lapcli.recipe.vision import CosineSchedule

STEPS_PER_EPOCH, EPOCHS = 7, 20
STEPS = STEPS_PER_EPOCH * EPOCHS


def timms(t_initial, warmup, start, final, peak):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    return CosineLRScheduler(optimizer, t_initial, lr_min=final, warmup_t=warmup, warmup_lr_init=start)


@pytest.mark.parametrize(("start", "peak", "final"), [(3e-6, 3e-4, 0.0), (1e-3, 3e-3, 1e-6)])
def test_every_step_is_timms(start, peak, final):
    schedule = CosineSchedule(warmup_epochs=5, start_lr=start, final_lr=final)
    stock = timms(STEPS, 5 * STEPS_PER_EPOCH, start, final, peak)
    for step in range(STEPS):
        expected = stock._get_lr(step)[0]
        assert peak * cosine_multiplier(schedule, peak, step, STEPS, STEPS_PER_EPOCH) == pytest.approx(expected)
    assert peak * cosine_multiplier(schedule, peak, 0, STEPS, STEPS_PER_EPOCH) == pytest.approx(start)
