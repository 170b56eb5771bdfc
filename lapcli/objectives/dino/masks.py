"""Which patches of the global crops are hidden from the student: rectangles, by (seed, step, group).

Of a group's G B global crops int(probability G B) get a mask. The i-th of n has exactly int(P r_i) masked patches, with
r_i on an even grid of n + 1 points over the range of ratios, of which the first is left out; then all crops of the
group are shuffled.
"""

import math

import numpy as np

FEWEST_PATCHES = 4  # of a rectangle, as far as there is room
SLIMMEST = 0.3  # height by width, or width by height
TRIES = 10


def deal_masks(
    crops: int, grid: tuple[int, int], probability: float, ratios: tuple[float, float], key: tuple[int, ...]
) -> np.ndarray:
    """crops x patches, True where hidden."""
    generator = np.random.default_rng(key)
    patches = grid[0] * grid[1]
    counts = mask_counts(crops, patches, probability, ratios)
    masks = np.zeros((crops, patches), dtype=bool)
    for row, count in enumerate(counts):
        masks[row] = block_mask(grid, count, generator).reshape(-1)
    return masks[generator.permutation(crops)]


def mask_counts(crops: int, patches: int, probability: float, ratios: tuple[float, float]) -> list[int]:
    masked = int(probability * crops)
    return [int(patches * ratio) for ratio in np.linspace(*ratios, masked + 1)[1:]]


def block_mask(grid: tuple[int, int], count: int, generator: np.random.Generator) -> np.ndarray:
    """Rectangles of random size, shape and place until `count` patches are hidden; the rest one by one.

    A rectangle's area is drawn from 4 to what is left, at most half of the grid, and its height by width between 0.3
    and 1 / 0.3, evenly in the logarithm. It has to be smaller than the grid both ways and to hide at least one patch
    more, but not too many; after ten failures in a row no more rectangles are tried.
    """
    mask: np.ndarray = np.zeros(grid, dtype=bool)
    hidden = 0
    while hidden < count:
        added = _add_rectangle(mask, min(count - hidden, mask.size // 2), generator)
        if not added:
            break
        hidden += added
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
