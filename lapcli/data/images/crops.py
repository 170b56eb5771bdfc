"""Crops of an image for self-supervised training, and the masks of their hidden patches.

Crops: two global ones, and local ones that cover less of the image.

                         global 1   global 2   local
    resized crop         yes        yes        yes
    mirrored             0.5        0.5        0.5
    colours jittered     0.8        0.8        0.8     brightness and contrast 0.4, saturation 0.2, hue 0.1
    grey                 0.2        0.2        0.2
    blurred, executed    0          0.9        0.5     9 x 9, deviation 0.1 to 2; `documented`: 1, 0.1, 0.5
    solarised at 128     -          0.2        -

The random draws for an image's crops are a function of (seed, epoch, image). A worker decodes the image and cuts its
crops; the other draws are sent with them and applied on the device, in `colours.py`.

Masks: rectangles of patches of the global crops, by (seed, step, group). Of a group's G B global crops int(probability
G B) get a mask. The i-th of n has exactly int(P r_i) masked patches, with r_i on an even grid of n + 1 points over the
range of ratios, without the first; then all crops of the group are shuffled.

Shapes: G global and Q local crops, B images, K random parameters per crop.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import ColorJitter, GaussianBlur, RandomResizedCrop

from lapcli.data.images.colours import ColourParameters
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Example, Reader, Request, seed_everything
from lapcli.recipe.dino import CropSource

GLOBALS = 2
#: Probability of blur for the first global, the second global and a local crop.
#: DINOv3's data/transforms.py passes 1 - p to RandomApply, so its documented probabilities are not the actual ones.
BLUR = {"executed": (0.0, 0.9, 0.5), "documented": (1.0, 0.1, 0.5)}
MIRRORED, JITTERED, GREY = 0.5, 0.8, 0.2
BRIGHTNESS = CONTRAST = (0.6, 1.4)
SATURATION, HUE = (0.8, 1.2), (-0.1, 0.1)
DEVIATIONS = (0.1, 2.0)  # of the blur, in pixels
RATIOS = [3 / 4, 4 / 3]  # aspect ratios of the box that is resized to a square
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class CropKind:
    """The size and probabilities of one kind of crop."""

    size: int  # pixels of a side
    scale: Sequence[float]  # share of the image's area
    blur: float  # probability
    solarise: float  # probability; 0: no random number is drawn


def crop_kinds(source: CropSource) -> tuple[CropKind, CropKind, CropKind]:
    """Return the kinds of the first global, the second global and a local crop."""
    crops = source.crops
    first, second, local = BLUR[crops.blur]
    return (
        CropKind(crops.global_size, crops.global_scale, first, 0.0),
        CropKind(crops.global_size, crops.global_scale, second, 0.2),
        CropKind(crops.local_size, crops.local_scale, local, 0.0),
    )


def draw(image: Image.Image, kind: CropKind) -> tuple[tuple[int, int, int, int], ColourParameters]:
    """Draw the box to cut out (left, top, right, bottom) and its augmentation.

    Draws come from torch's generator, in the order in which torchvision's transforms would draw them.
    """
    top, left, height, width = RandomResizedCrop.get_params(image, list(kind.scale), RATIOS)
    mirrored = bool(torch.rand(1) < MIRRORED)
    order: list[int] = []
    factors: Sequence[float] = ColourParameters.factors
    # <=, as in RandomApply, here and for the blur; flip and grey test with <.
    if torch.rand(1) <= JITTERED:
        turns, *jitters = ColorJitter.get_params(BRIGHTNESS, CONTRAST, SATURATION, HUE)
        order, factors = turns.tolist(), (*jitters[:3], _hue_of_pillow(jitters[3]))
    is_grey = bool(torch.rand(1) < GREY)
    deviation = GaussianBlur.get_params(*DEVIATIONS) if torch.rand(1) <= kind.blur else 0.0
    solarised = kind.solarise > 0 and bool(torch.rand(1) < kind.solarise)
    drawn = ColourParameters(mirrored, order, factors, is_grey, deviation, solarised)
    return (left, top, left + width, top + height), drawn


def _hue_of_pillow(shift: float) -> float:
    """Return the average hue shift that results from Pillow's 8 bits.

    Pillow truncates hues to 255ths of the circle, shifts them by integers and wraps at 256, which loses a level. The
    drawn shift itself would differ from that by up to 16 of 255 in a channel of a photograph; the result here differs
    by 10 at most.
    """
    return (int(255 * shift) - (0.85 if shift > 0 else 0.15)) / 255


@dataclass(frozen=True)
class BatchMasks:
    """Masks of this process's micro-batches, as a function of step and micro-step."""

    grid: tuple[int, int]
    source: CropSource
    seed: int
    group: int
    images: int  # of a micro-batch
    first: Callable[[int], int]  # from the micro-step to the place of its first image in the global batch

    def __call__(self, step: int, micro_step: int) -> np.ndarray:
        """Return the masks in the order of the global crops."""
        section, number = self.source.masks, self.first(micro_step) // self.group
        by_group = [
            deal_masks(GLOBALS * self.group, self.grid, section.probability, section.ratio, (self.seed, step, each))
            for each in range(number, number + self.images // self.group)
        ]
        # From per-group order to per-crop order over all groups, which is the order of the crops.
        by_crop = [masks.reshape(GLOBALS, self.group, -1) for masks in by_group]
        return np.concatenate(by_crop, axis=1).reshape(GLOBALS * self.images, -1)


class CropReader(Reader):
    """Reads G x B global and Q x B local uint8 crops and the random draws for each, and draws a batch's masks."""

    def __init__(self, images: ImageSet, source: CropSource, seed: int, masks: BatchMasks | None = None) -> None:
        self._images, self._key, self._crops, self._masks = images, seed, source.crops, masks
        *self._globals, self._local = crop_kinds(source)
        self._filter = FILTERS[source.interpolation]

    def read(self, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        """Return global and local crops, then the draws for global and for local crops."""
        crops, count = self._crops, len(examples)
        # Channels last, as Pillow has them; `Recolouring` transposes them on the device.
        global_GBHWC = np.empty((GLOBALS, count, crops.global_size, crops.global_size, 3), dtype=np.uint8)
        local_QBHWC = np.empty((crops.locals, count, crops.local_size, crops.local_size, 3), dtype=np.uint8)
        global_GBK = np.empty((GLOBALS, count, ColourParameters.K), dtype=np.float32)
        local_QBK = np.empty((crops.locals, count, ColourParameters.K), dtype=np.float32)
        for row, example in enumerate(examples):
            image = self._images.image(example.index)
            seed_everything(self._key, example.epoch, example.index, example.repeat)
            for crop, kind in enumerate(self._globals):
                global_GBHWC[crop, row], global_GBK[crop, row] = self._crop(image, kind)
            for crop in range(crops.locals):
                local_QBHWC[crop, row], local_QBK[crop, row] = self._crop(image, self._local)
        return tuple(map(torch.from_numpy, (global_GBHWC, local_QBHWC, global_GBK, local_QBK)))

    def batch(self, request: Request, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        """Return crops and draws, then the masks and the indices of the hidden patches."""
        assert self._masks is not None
        masks_MP = self._masks(*request)
        # Computed here, because on a GPU the number of hidden patches would be a host sync.
        return (*self.read(examples), torch.from_numpy(masks_MP), torch.from_numpy(np.flatnonzero(masks_MP)))

    def _crop(self, image: Image.Image, kind: CropKind) -> tuple[np.ndarray, list[float]]:
        """Return a crop's pixels, H x W x C, and the draws that are still to be applied."""
        box, drawn = draw(image, kind)
        # Not `resize(box=...)`, whose filter would read pixels beyond the edges of the box.
        return np.asarray(image.crop(box).resize((kind.size, kind.size), self._filter)), drawn.numbers()


FEWEST_PATCHES = 4  # of a rectangle, if there is room
SLIMMEST = 0.3  # height by width, or width by height
TRIES = 10


def deal_masks(
    crops: int, grid: tuple[int, int], probability: float, ratios: Sequence[float], key: tuple[int, ...]
) -> np.ndarray:
    """Draw the masks of a group, crops x patches, True for hidden patches."""
    generator = np.random.default_rng(key)
    patches = grid[0] * grid[1]
    counts = mask_counts(crops, patches, probability, ratios)
    masks = np.zeros((crops, patches), dtype=bool)
    for row, count in enumerate(counts):
        masks[row] = block_mask(grid, count, generator).reshape(-1)
    return masks[generator.permutation(crops)]


def mask_counts(crops: int, patches: int, probability: float, ratios: Sequence[float]) -> list[int]:
    masked = int(probability * crops)
    # As in DINOv3's data/collate.py, which takes the upper end of each of n ranges.
    return [int(patches * ratio) for ratio in np.linspace(ratios[0], ratios[1], masked + 1)[1:]]


def block_mask(grid: tuple[int, int], count: int, generator: np.random.Generator) -> np.ndarray:
    """Hide exactly `count` patches: by rectangles of random size, shape and place, then the rest patch by patch.

    A rectangle's area is drawn from 4 to the remaining count, at most half of the grid, and its aspect ratio between
    0.3 and 1 / 0.3, log-uniformly. It has to be smaller than the grid in both dimensions and to hide at least one more
    patch, but not too many; after ten failures in a row no more rectangles are tried.
    """
    mask: np.ndarray = np.zeros(grid, dtype=bool)
    hidden = 0
    while hidden < count:
        # At most half of the grid in one rectangle, as with DINOv3's max_num_patches (98 of 196 patches).
        added = _add_rectangle(mask, min(count - hidden, mask.size // 2), generator)
        if not added:
            break
        hidden += added
    # Single patches fill up to the exact count, as in DINOv3's data/masking.py.
    free = np.flatnonzero(~mask)
    mask.reshape(-1)[generator.choice(free, count - hidden, replace=False)] = True
    return mask


def _add_rectangle(mask: np.ndarray, room: int, generator: np.random.Generator) -> int:
    rows, columns = mask.shape
    for _ in range(TRIES):
        area = FEWEST_PATCHES + (room - FEWEST_PATCHES) * generator.random()
        shape = math.exp(generator.uniform(math.log(SLIMMEST), -math.log(SLIMMEST)))
        height, width = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if not (height < rows and width < columns):
            continue
        top, left = generator.integers(rows - height + 1), generator.integers(columns - width + 1)
        inside = mask[top : top + height, left : left + width]
        new = inside.size - int(inside.sum())
        if 0 < new <= room:
            inside[:] = True
            return new
    return 0
