"""Transforms of training and evaluation images, from timm: a PIL image in, uint8 pixels of the model's size out.

Normalising comes after, in `normalise`, on the device: bytes travel from the workers, not floats.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import Compose, InterpolationMode, RandomCrop, Resize

from lapcli.data.images.batches import seed_everything
from lapcli.recipe.vision import ImageFiles, ImageSource
from lapcli.runtime.errors import UsageError


def training_transform(source: ImageSource, size: int) -> Compose:
    wanted = source.augmentation
    try:
        transform = _create(source, size)
    except (AssertionError, KeyError, ValueError) as error:
        raise UsageError(f"data.augmentation.policy {wanted.policy!r} is not a timm policy: {error}") from None
    if wanted.crop == "padded":  # as in the DeiT repository for images of 32 pixels
        transform.transforms[0] = _Sized(
            size, source, RandomCrop(size, padding=4 if wanted.padding is None else wanted.padding)
        )
    elif wanted.crop == "none":
        transform.transforms[0] = _Sized(size, source, None)
    _keep_posterising(transform)
    transform.transforms[-1] = as_pixels
    return transform


def _create(source: ImageSource, size: int) -> Compose:
    wanted = source.augmentation
    return create_transform(
        size,
        is_training=True,
        scale=(wanted.scale[0], wanted.scale[1]) if wanted.scale else None,
        hflip=wanted.flip,
        color_jitter=wanted.color_jitter,  # type: ignore[arg-type]
        auto_augment=wanted.policy,
        interpolation=source.interpolation,
        mean=tuple(source.mean),  # what RandAugment fills with
        std=tuple(source.std),
        normalize=False,
    )


def _keep_posterising(transform: Compose) -> None:
    """At its highest level timm's RandAugment keeps 0 bits of a colour, which Pillow refuses since version 13."""
    for part in transform.transforms:
        policies = getattr(part, "policy", [])
        for operation in [*getattr(part, "ops", []), *(op for policy in policies for op in policy)]:
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterise


def _posterise(image, bits, **options):  # type: ignore[no-untyped-def]
    """A black image for 0 bits, as with every Pillow before."""
    return auto_augment.posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)


def evaluation_transform(source: ImageFiles, size: int) -> Compose:
    """Shorter side to size / crop_ratio, then the centre; an image of the right size stays as it is."""
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
    """Channels first, as a view: whoever fills a batch copies once. PILToTensor and torch's copy take twice as long."""
    return np.asarray(image).transpose(2, 0, 1)


class _Sized:
    """Brings an image of another size to the model's, then crops."""

    def __init__(self, size: int, source: ImageSource, crop: RandomCrop | None) -> None:
        self._size, self._crop = (size, size), crop
        self._resize = Resize(self._size, InterpolationMode(source.interpolation))

    def __call__(self, image):  # type: ignore[no-untyped-def]
        image = image if image.size == self._size else self._resize(image)
        return image if self._crop is None else self._crop(image)


def normalise(images_BCHW: Tensor, source: ImageFiles) -> Tensor:
    """uint8 to float32 of mean 0 and deviation 1, by the recipe's numbers."""
    mean, std = (_channels(tuple(x), images_BCHW.device) for x in (source.mean, source.std))
    return images_BCHW.float().sub_(mean).div_(std)


@lru_cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept on its device: the host waits for a copy that is not pinned."""
    return torch.tensor(values, device=device)[:, None, None] * 255


class Eraser:
    """Random erasing of normalised images, keyed like the rest of an example's augmentation."""

    def __init__(self, probability: float) -> None:
        self._erase = RandomErasing(probability, mode="pixel", device="cpu")

    def __call__(self, images_BCHW: Tensor, keys: Sequence[tuple[int, ...]]) -> Tensor:
        """In place, on the CPU: its generator draws the same on every machine."""
        for image_CHW, key in zip(images_BCHW, keys, strict=True):
            seed_everything(*key, 1)  # another stream than the crop's
            self._erase(image_CHW)
        return images_BCHW
