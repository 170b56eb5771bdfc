"""Mixup and CutMix for fixed groups of the global batch, with partners side by side.

timm mixes image i of a GPU's batch with image n - 1 - i, with one lambda (and one box) for the batch. Here a group of
the global batch takes the GPU's place: lambda and box are drawn by (seed, step, group), and the group is ordered
0, n-1, 1, n-2, ... so that partners are neighbours and fall into one micro-batch of even size. Neither the number of
processes nor the micro-batch changes what is mixed, and no image is decoded for another's sake.

Shapes: B images, C channels, H x W pixels, K classes.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from torch import Tensor

from lapcli.data.images.batches import seed_everything
from lapcli.recipe.vision import Mixing

Box = tuple[int, int, int, int]  # y from, y to, x from, x to


@dataclass(frozen=True)
class GroupMix:
    """What a group shares: each image keeps `share` of itself; CutMix takes the rest from the partner's box."""

    share: float
    box: Box | None


class Mixer:
    def __init__(self, section: Mixing, *, classes: int, image: int, batch: int, seed: int) -> None:
        self._section, self._classes, self._image, self._seed = section, classes, image, seed
        self.group = (section.group or batch) if section.is_on else batch
        self._draws = Mixup(
            mixup_alpha=section.mixup,
            cutmix_alpha=section.cutmix,
            prob=section.probability,
            switch_prob=section.cutmix_share,
            label_smoothing=section.label_smoothing,
            num_classes=classes,
        )

    def mixture(self, step: int, group: int) -> GroupMix:
        """Drawn by timm from generators keyed by (seed, step, group); nobody else's are touched."""
        if not self._section.is_on:
            return GroupMix(1.0, None)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            seed_everything(self._seed, step, group)
            share, is_cutmix = self._draws._params_per_batch()
            if share == 1.0 or not is_cutmix:
                return GroupMix(float(share), None)
            box, share = cutmix_bbox_and_lam((self._image, self._image), share)
            top, bottom, left, right = map(int, box)
            return GroupMix(float(share), (top, bottom, left, right))
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def __call__(self, images_BCHW: Tensor, labels_B: Tensor, step: int, first: int) -> tuple[Tensor, Tensor]:
        """Mixes images `first` and on of a global batch in place; their targets are rows of class shares."""
        targets_BK = self._one_hot(labels_B)
        start = 0
        while start < len(labels_B):
            group, place = divmod(first + start, self.group)
            end = min(len(labels_B), start + self.group - place)
            mixture = self.mixture(step, group)
            if mixture.share < 1.0:
                _mix_images(images_BCHW[start:end], mixture)
                part_BK = targets_BK[start:end]
                part_BK.copy_(part_BK * mixture.share + _partners(part_BK) * (1.0 - mixture.share))
            start = end
        return images_BCHW, targets_BK

    def _one_hot(self, labels_B: Tensor) -> Tensor:
        off = self._section.label_smoothing / self._classes
        targets_BK = torch.full((len(labels_B), self._classes), off, device=labels_B.device)
        return targets_BK.scatter_(1, labels_B[:, None], 1.0 - self._section.label_smoothing + off)


def _mix_images(images_BCHW: Tensor, mixture: GroupMix) -> None:
    if mixture.box is None:
        partners = _partners(images_BCHW).mul_(1.0 - mixture.share)
        images_BCHW.mul_(mixture.share).add_(partners)
        return
    top, bottom, left, right = mixture.box
    inside = images_BCHW[:, :, top:bottom, left:right]
    inside.copy_(_partners(inside))


def _partners(x: Tensor) -> Tensor:
    """A copy with neighbours 0 and 1, 2 and 3, ... exchanged."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
