"""Several augmented crops of each image: two global ones, and local ones that cover less of it.

                         global 1   global 2   local
    resized crop         yes        yes        yes
    mirrored             0.5        0.5        0.5
    colours jittered     0.8        0.8        0.8     brightness and contrast 0.4, saturation 0.2, hue 0.1
    grey                 0.2        0.2        0.2
    blurred, executed    0          0.9        0.5     9 x 9, deviation 0.1 to 2; `documented`: 1, 0.1, 0.5
    solarised at 128     -          0.2        -

What an image's crops draw is a function of (seed, epoch, image). Bytes travel from the workers; normalising comes
after.

Shapes: G global and Q local crops, B images.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.transforms import (
    ColorJitter,
    Compose,
    GaussianBlur,
    InterpolationMode,
    RandomApply,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomSolarize,
)

from lapcli.data.images.augmentation import as_pixels
from lapcli.data.images.batches import Example, seed_everything
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Reader
from lapcli.recipe.dino import CropSource

GLOBALS = 2
#: Probability of blur for the first global, the second global and a local crop.
BLUR = {"executed": (0.0, 0.9, 0.5), "documented": (1.0, 0.1, 0.5)}


def crop_transforms(source: CropSource) -> tuple[Compose, Compose, Compose]:
    """The transforms of the first global, the second global and a local crop."""
    crops = source.crops
    first, second, local = BLUR[crops.blur]
    return (
        _transform(source, crops.global_size, crops.global_scale, first, 0.0),
        _transform(source, crops.global_size, crops.global_scale, second, 0.2),
        _transform(source, crops.local_size, crops.local_scale, local, 0.0),
    )


def _transform(source: CropSource, size: int, scale: Sequence[float], blur: float, solarise: float) -> Compose:
    return Compose(
        [
            RandomResizedCrop(size, (scale[0], scale[1]), interpolation=InterpolationMode(source.interpolation)),
            RandomHorizontalFlip(0.5),
            RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            RandomGrayscale(0.2),
            RandomApply([GaussianBlur(9, (0.1, 2.0))], blur),
            *([RandomSolarize(128, solarise)] if solarise else []),
            as_pixels,
        ]
    )


class CropReader(Reader):
    """A list of examples to G x B global and Q x B local crops, uint8."""

    def __init__(self, images: ImageSet, source: CropSource, seed: int) -> None:
        self._images, self._key, self._crops = images, seed, source.crops
        self._transforms = crop_transforms(source)

    @property
    def example_bytes(self) -> int:
        crops = self._crops
        return 3 * (GLOBALS * crops.global_size**2 + crops.locals * crops.local_size**2)

    def read(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        crops, count = self._crops, len(examples)
        global_GBCHW = torch.empty(GLOBALS, count, 3, crops.global_size, crops.global_size, dtype=torch.uint8)
        local_QBCHW = torch.empty(crops.locals, count, 3, crops.local_size, crops.local_size, dtype=torch.uint8)
        globals_, locals_ = global_GBCHW.numpy(), local_QBCHW.numpy()  # the same memory, filled faster
        for row, example in enumerate(examples):
            image = self._images.image(example.index)
            seed_everything(self._key, example.epoch, example.index, example.repeat)
            for crop in range(GLOBALS):
                globals_[crop, row] = self._transforms[crop](image)
            for crop in range(crops.locals):
                locals_[crop, row] = self._transforms[GLOBALS](image)
        return global_GBCHW, local_QBCHW
