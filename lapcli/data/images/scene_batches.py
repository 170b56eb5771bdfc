"""Training crops of scenes and their label maps: scaled, cropped, flipped, with distorted colours.

Everything random about a crop is drawn by (seed, epoch, scene), as for other images.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional

from lapcli.data.images.ade20k import IGNORED, Scenes
from lapcli.data.images.batches import Example
from lapcli.data.images.loader import Reader
from lapcli.data.keyed import seed_everything

CROP_TRIES, LARGEST_SHARE = 10, 0.75


class SceneReader(Reader):
    """A list of examples to uint8 crops and their classes, both as tensors; the same interface as for other images."""

    def __init__(self, scenes: Scenes, size: int, scale: Sequence[float], fill: Sequence[float], seed: int) -> None:
        self._scenes, self._crop_size, self._scale = scenes, size, (scale[0], scale[1])
        # What is beyond the photograph is the mean colour: 0 after normalising, to half a grey level.
        self._fill = np.array([round(255 * x) for x in fill], dtype=np.uint8)
        self._key = seed

    @property
    def example_bytes(self) -> int:
        return 4 * self._crop_size**2  # three colours and a class

    def read(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        size = self._crop_size
        images_BCHW = torch.empty(len(examples), 3, size, size, dtype=torch.uint8)
        labels_BHW = torch.empty(len(examples), size, size, dtype=torch.uint8)
        for row, example in enumerate(examples):
            image, labels = self._scenes.scene(example.index)
            seed_everything(self._key, example.epoch, example.index, example.repeat)
            pixels, classes = self._augmented(image, labels)
            images_BCHW[row] = torch.from_numpy(pixels).permute(2, 0, 1)
            labels_BHW[row] = torch.from_numpy(classes)
        return images_BCHW, labels_BHW

    def _augmented(self, image: Image.Image, labels_HW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self._crop_size
        image = resize_short_side(image, max(1, round(size * random.uniform(*self._scale))))
        resized = Image.fromarray(labels_HW).resize(image.size, Image.Resampling.NEAREST)
        pixels_HWC, labels_HW = np.asarray(image), np.asarray(resized)
        window = choose_crop(labels_HW, size)
        pixels_HWC, labels_HW = pixels_HWC[window], labels_HW[window]
        if random.random() < 0.5:
            pixels_HWC, labels_HW = pixels_HWC[:, ::-1], labels_HW[:, ::-1]
        pixels_HWC = distort_colours(pixels_HWC.copy())
        padded_HWC = np.broadcast_to(self._fill, (size, size, 3)).copy()
        padded_HW = np.full((size, size), IGNORED, dtype=np.uint8)
        height, width = labels_HW.shape
        padded_HWC[:height, :width], padded_HW[:height, :width] = pixels_HWC, labels_HW
        return padded_HWC, padded_HW


def resize_short_side(image: Image.Image, size: int) -> Image.Image:
    """Bilinear, keeping the proportions."""
    scale = size / min(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def choose_crop(labels_HW: np.ndarray, size: int) -> tuple[slice, slice]:
    """A random window; up to ten tries for one with several classes, none of them over 75% of what is labelled."""
    height, width = labels_HW.shape
    for _ in range(CROP_TRIES):
        top, left = random.randint(0, max(0, height - size)), random.randint(0, max(0, width - size))
        window = slice(top, top + size), slice(left, left + size)
        counts = np.bincount(labels_HW[window].reshape(-1), minlength=IGNORED + 1)[:IGNORED]
        if np.count_nonzero(counts) > 1 and counts.max() <= LARGEST_SHARE * counts.sum():
            break
    return window


def distort_colours(pixels_HWC: np.ndarray) -> np.ndarray:
    """Each with probability 1/2: brightness +-32 grey levels, contrast and saturation by 0.5 to 1.5, any hue.

    Contrast comes first or last, by the toss of a coin.
    """
    image = torch.from_numpy(pixels_HWC).permute(2, 0, 1).float() / 255
    contrast_first = random.random() < 0.5
    if random.random() < 0.5:
        image = (image + random.uniform(-32, 32) / 255).clamp_(0, 1)
    contrast = random.uniform(0.5, 1.5) if random.random() < 0.5 else 1.0
    if contrast_first:
        image = (image * contrast).clamp_(0, 1)
    if random.random() < 0.5:
        image = functional.adjust_saturation(image, random.uniform(0.5, 1.5))
    if random.random() < 0.5:
        image = functional.adjust_hue(image, random.uniform(-0.5, 0.5))
    if not contrast_first:
        image = (image * contrast).clamp_(0, 1)
    return (image * 255).round_().to(torch.uint8).permute(1, 2, 0).numpy()
