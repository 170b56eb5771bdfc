"""Mixup and CutMix: hand-worked targets, and timm's own mixing of the complete group as the oracle."""

import random

import numpy as np
import pytest
import torch
from timm.data import Mixup

from lapcli.data.images.augmentation import Mixer
from lapcli.data.images.loader import pair_order, seed_everything
from lapcli.recipe.vision import Mixing

BATCH, GROUP, CLASSES, SIZE, SEED = 24, 8, 5, 16, 3


def mixer(batch=BATCH, **keys):
    section = Mixing(**{"mixup": 0.8, "cutmix": 1.0, "group": GROUP, **keys})
    return Mixer(section, classes=CLASSES, image=SIZE, batch=batch, seed=SEED)


def batch():
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(BATCH, 3, SIZE, SIZE, generator=generator),
        torch.randint(CLASSES, (BATCH,), generator=generator),
    )


@pytest.mark.parametrize("keys", [{}, {"cutmix": 0.0}, {"mixup": 0.0}, {"probability": 0.5}, {"label_smoothing": 0.1}])
def test_a_group_is_mixed_like_a_gpu_batch_in_timm(keys):
    made = mixer(**keys)
    section = Mixing(**{"mixup": 0.8, "cutmix": 1.0, **keys})
    stock = Mixup(
        mixup_alpha=section.mixup,
        cutmix_alpha=section.cutmix,
        prob=section.probability,
        label_smoothing=section.label_smoothing,
        num_classes=CLASSES,
    )
    kinds = set()
    for step in range(12):
        images, labels = batch()
        mixed, targets = made(images.clone(), labels, step, 0)
        for group in range(BATCH // GROUP):
            inside = slice(group * GROUP, (group + 1) * GROUP)
            # timm's order: image i with image n - 1 - i.
            back = np.argsort(pair_order(GROUP))
            seed_everything(SEED, step, group)
            expected, shares = stock(images[inside][back].clone(), labels[inside][back])
            torch.testing.assert_close(mixed[inside][back], expected, atol=1e-6, rtol=0)
            torch.testing.assert_close(targets[inside][back], shares, atol=1e-6, rtol=0)
            kinds.add(made.mixture(step, group).box is not None)
    assert len(kinds) == (1 if section.mixup == 0 or section.cutmix == 0 else 2)


@pytest.mark.parametrize("micro_batch", [2, 6, 24])
def test_mixing_does_not_depend_on_the_micro_batch(micro_batch):
    images, labels = batch()
    made = mixer()
    whole = made(images.clone(), labels, 7, 0)
    parts = [
        made(images[first : first + micro_batch].clone(), labels[first : first + micro_batch], 7, first)
        for first in range(0, BATCH, micro_batch)
    ]
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_groups_and_steps_have_independent_draws():
    made = mixer()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    drawn = [made.mixture(step, group) for step in range(4) for group in range(3)]
    after = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert after == (random.random(), np.random.rand(), torch.rand(1).item())
    assert len({mixture.share for mixture in drawn}) == len(drawn)
    assert drawn == [made.mixture(step, group) for step in range(4) for group in range(3)]
