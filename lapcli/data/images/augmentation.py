"""Augmentation of images for the model: timm's transforms, normalising, and mixing with another image.

A transform takes a PIL image and returns uint8 pixels of the model's size. `normalise` follows on the device, so that
workers send bytes instead of floats.

Mixup and CutMix work on fixed groups of the global batch, with partners side by side. timm mixes image i of a GPU's
batch with image n - 1 - i, with one lambda (and one box) for the batch. Here a group of the global batch replaces
the GPU's batch: lambda and box are drawn by (seed, step, group), and the group is ordered 0, n-1, 1, n-2, ... so that
partners are neighbours and fall into one micro-batch of even size. Mixing does not depend on the number of processes
or the micro-batch, and no image is decoded only as a partner.

Shapes: B images, C channels, H x W pixels, K classes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.mixup import Mixup, cutmix_bbox_and_lam
from torch import Tensor
from torchvision.transforms import Compose, InterpolationMode, RandomCrop, Resize

from lapcli.data.images.loader import seed_everything
from lapcli.recipe.vision import ImageFiles, ImageSource, Mixing


def training_transform(source: ImageSource, size: int, scale: Sequence[float] | None = None) -> Compose:
    wanted = source.augmentation
    transform = create_transform(
        size,
        is_training=True,
        scale=(scale[0], scale[1]) if scale else None,
        hflip=wanted.flip,
        color_jitter=wanted.color_jitter,  # type: ignore[arg-type]
        auto_augment=wanted.policy,
        interpolation=source.interpolation,
        mean=tuple(source.mean),  # RandAugment's fill colour
        std=tuple(source.std),
        normalize=False,
    )
    if wanted.crop == "padded":  # as in the DeiT repository for images of 32 pixels
        transform.transforms[0] = _Sized(size, source, RandomCrop(size, padding=4))
    elif wanted.crop == "none":
        transform.transforms[0] = _Sized(size, source, None)
    _keep_posterising(transform)
    transform.transforms[-1] = as_pixels
    return transform


def _keep_posterising(transform: Compose) -> None:
    """Replace timm's posterising, whose highest level keeps 0 bits, which Pillow refuses since version 13."""
    for part in transform.transforms:
        policies = getattr(part, "policy", [])
        for operation in [*getattr(part, "ops", []), *(op for policy in policies for op in policy)]:
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterise


def _posterise(image, bits, **options):  # type: ignore[no-untyped-def]
    """Return a black image for 0 bits, as Pillow did before version 13."""
    return auto_augment.posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)


def evaluation_transform(source: ImageFiles, size: int) -> Compose:
    """Resize the shorter side to size / crop_ratio, then crop the centre; an image of that size stays unchanged."""
    transform = create_transform(
        size,
        is_training=False,
        interpolation=source.interpolation,
        crop_pct=source.crop_ratio,
        normalize=False,
    )
    transform.transforms[-1] = as_pixels
    return transform


def as_pixels(image: Image.Image) -> np.ndarray:
    """Return pixels with channels first, as a view that is copied once into the batch; PILToTensor would copy twice."""
    return np.asarray(image).transpose(2, 0, 1)


class _Sized:
    """Resizes an image to the model's size if needed, then crops."""

    def __init__(self, size: int, source: ImageSource, crop: RandomCrop | None) -> None:
        self._size, self._crop = (size, size), crop
        self._resize = Resize(self._size, InterpolationMode(source.interpolation))

    def __call__(self, image):  # type: ignore[no-untyped-def]
        image = image if image.size == self._size else self._resize(image)
        return image if self._crop is None else self._crop(image)


def normalise(images_BCHW: Tensor, source: ImageFiles) -> Tensor:
    """Convert uint8 to float32 of mean 0 and deviation 1, by the recipe's mean and std."""
    mean, std = (_channels(tuple(x), images_BCHW.device) for x in (source.mean, source.std))
    return images_BCHW.float().sub_(mean).div_(std)


@lru_cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a cached tensor on its device: copying it for every batch would synchronise host and device."""
    return torch.tensor(values, device=device)[:, None, None] * 255


Box = tuple[int, int, int, int]  # y from, y to, x from, x to


@dataclass(frozen=True)
class GroupMix:
    """The mixing of a group: each image keeps the fraction `share`; CutMix takes the rest from the partner's box."""

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
            label_smoothing=section.label_smoothing,
            num_classes=classes,
        )

    def mixture(self, step: int, group: int) -> GroupMix:
        """Draw the mixing of a group with timm, keyed by (seed, step, group); the global generators are restored."""
        if not self._section.is_on:
            return GroupMix(1.0, None)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            seed_everything(self._seed, step, group)
            share, is_cutmix = self._draws._params_per_batch()  # timm has no public method for the draw alone
            if share == 1.0 or not is_cutmix:
                return GroupMix(float(share), None)
            # timm's corrected lambda: a box clipped at the edge takes less from the partner than drawn.
            box, share = cutmix_bbox_and_lam((self._image, self._image), share)
            top, bottom, left, right = map(int, box)
            return GroupMix(float(share), (top, bottom, left, right))
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def __call__(self, images_BCHW: Tensor, labels_B: Tensor, step: int, first: int) -> tuple[Tensor, Tensor]:
        """Mix images in place, numbered from `first` in the global batch; return them and their targets, B x K."""
        targets_BK = self._one_hot(labels_B)
        start = 0
        # A micro-batch may span two groups, and each has its own draw.
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
        # As in timm's mixup_target: the smoothing is spread over all K classes, including the true class.
        targets_BK = torch.full((len(labels_B), self._classes), off, device=labels_B.device)
        return targets_BK.scatter_(1, labels_B[:, None], 1.0 - self._section.label_smoothing + off)


def _mix_images(images_BCHW: Tensor, mixture: GroupMix) -> None:
    if mixture.box is None:
        # A copy (`flip` makes one), so that partners are mixed from the images before the mixing.
        partners = _partners(images_BCHW).mul_(1.0 - mixture.share)
        images_BCHW.mul_(mixture.share).add_(partners)
        return
    top, bottom, left, right = mixture.box
    inside = images_BCHW[:, :, top:bottom, left:right]
    inside.copy_(_partners(inside))


def _partners(x: Tensor) -> Tensor:
    """Return a copy with neighbours 0 and 1, 2 and 3, ... exchanged."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
