"""Several augmented crops of each image: two global ones, and local ones that cover less of it.

                         global 1   global 2   local
    resized crop         yes        yes        yes
    mirrored             0.5        0.5        0.5
    colours jittered     0.8        0.8        0.8     brightness and contrast 0.4, saturation 0.2, hue 0.1
    grey                 0.2        0.2        0.2
    blurred, executed    0          0.9        0.5     9 x 9, deviation 0.1 to 2; `documented`: 1, 0.1, 0.5
    solarised at 128     -          0.2        -

What an image's crops draw is a function of (seed, epoch, image). A worker decodes the image and cuts its crops; the
rest of what it drew travels with them and is applied on the device, in `colours.py`.

Shapes: G global and Q local crops, B images, K numbers of what was drawn for a crop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import ColorJitter, GaussianBlur, RandomResizedCrop

from lapcli.data.images.batches import Example, seed_everything
from lapcli.data.images.colours import Drawn
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Reader
from lapcli.recipe.dino import CropSource

GLOBALS = 2
#: Probability of blur for the first global, the second global and a local crop.
BLUR = {"executed": (0.0, 0.9, 0.5), "documented": (1.0, 0.1, 0.5)}
MIRRORED, JITTERED, GREY = 0.5, 0.8, 0.2
BRIGHTNESS = CONTRAST = (0.6, 1.4)
SATURATION, HUE = (0.8, 1.2), (-0.1, 0.1)
DEVIATIONS = (0.1, 2.0)  # of the blur, in pixels
RATIOS = [3 / 4, 4 / 3]  # width by height of what is cut out, before it becomes square
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class CropKind:
    """How crops of one kind are drawn."""

    size: int  # pixels of a side
    scale: Sequence[float]  # share of the image's area
    blur: float  # probability
    solarise: float  # probability; 0: not even drawn


def crop_kinds(source: CropSource) -> tuple[CropKind, CropKind, CropKind]:
    """The first global, the second global and a local crop."""
    crops = source.crops
    first, second, local = BLUR[crops.blur]
    return (
        CropKind(crops.global_size, crops.global_scale, first, 0.0),
        CropKind(crops.global_size, crops.global_scale, second, 0.2),
        CropKind(crops.local_size, crops.local_scale, local, 0.0),
    )


def draw(image: Image.Image, kind: CropKind) -> tuple[tuple[int, int, int, int], Drawn]:
    """The box to cut out (left, top, right, bottom), and what becomes of it.

    From torch's generator, in the order in which torchvision's transforms draw, one after the other.
    """
    top, left, height, width = RandomResizedCrop.get_params(image, list(kind.scale), RATIOS)
    mirrored = bool(torch.rand(1) < MIRRORED)
    order: list[int] = []
    factors: Sequence[float] = Drawn.factors
    if torch.rand(1) <= JITTERED:
        turns, *given = ColorJitter.get_params(BRIGHTNESS, CONTRAST, SATURATION, HUE)
        order, factors = turns.tolist(), (*given[:3], _hue_of_pillow(given[3]))
    is_grey = bool(torch.rand(1) < GREY)
    deviation = GaussianBlur.get_params(*DEVIATIONS) if torch.rand(1) <= kind.blur else 0.0
    solarised = kind.solarise > 0 and bool(torch.rand(1) < kind.solarise)
    drawn = Drawn(mirrored, order, factors, is_grey, deviation, solarised)
    return (left, top, left + width, top + height), drawn


def _hue_of_pillow(shift: float) -> float:
    """A shift of the hue as Pillow's 8 bits make it, on average.

    Pillow cuts hues down to 255ths of the circle, shifts them by whole ones and wraps at 256, which loses one more. A
    shift by exactly what was drawn would differ from that by up to 16 of 255 in a channel of a photograph; this one
    by 10 at most.
    """
    return (int(255 * shift) - (0.85 if shift > 0 else 0.15)) / 255


class CropReader(Reader):
    """A list of examples to G x B global and Q x B local crops, uint8, and what was drawn for each."""

    def __init__(self, images: ImageSet, source: CropSource, seed: int) -> None:
        self._images, self._key, self._crops = images, seed, source.crops
        *self._globals, self._local = crop_kinds(source)
        self._filter = FILTERS[source.interpolation]

    @property
    def example_bytes(self) -> int:
        crops = self._crops
        drawn = (GLOBALS + crops.locals) * Drawn.K * torch.float32.itemsize
        return 3 * (GLOBALS * crops.global_size**2 + crops.locals * crops.local_size**2) + drawn

    def read(self, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        """Global and local crops, then what was drawn for global and for local ones."""
        crops, count = self._crops, len(examples)
        global_GBHWC = np.empty((GLOBALS, count, crops.global_size, crops.global_size, 3), dtype=np.uint8)
        local_QBHWC = np.empty((crops.locals, count, crops.local_size, crops.local_size, 3), dtype=np.uint8)
        global_GBK = np.empty((GLOBALS, count, Drawn.K), dtype=np.float32)
        local_QBK = np.empty((crops.locals, count, Drawn.K), dtype=np.float32)
        for row, example in enumerate(examples):
            image = self._images.image(example.index)
            seed_everything(self._key, example.epoch, example.index, example.repeat)
            for crop, kind in enumerate(self._globals):
                global_GBHWC[crop, row], global_GBK[crop, row] = self._crop(image, kind)
            for crop in range(crops.locals):
                local_QBHWC[crop, row], local_QBK[crop, row] = self._crop(image, self._local)
        return tuple(map(torch.from_numpy, (global_GBHWC, local_QBHWC, global_GBK, local_QBK)))

    def _crop(self, image: Image.Image, kind: CropKind) -> tuple[np.ndarray, list[float]]:
        """Its pixels, H x W x C, and what is still to be done."""
        box, drawn = draw(image, kind)
        # Cut out first: given a box, Pillow's filter would look beyond its edges.
        return np.asarray(image.crop(box).resize((kind.size, kind.size), self._filter)), drawn.numbers()
