"""Which images a step trains on: a function of (seed, step), whatever the processes and workers.

An epoch is a permutation of the images drawn by (seed, epoch), each taken `repeats` times in a row, cut to as many as
there are images; it has as many whole batches as fit, and the rest is left out (another rest in each epoch). The
positions of a batch go to its groups in turn, as timm's samplers deal them to GPUs, so that copies of an image fall
into different groups.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lapcli.data.images.mixing import pair_order
from lapcli.runtime.errors import DataError


@dataclass(frozen=True)
class Example:
    """One augmented image: everything random about it is drawn by (seed, epoch, index, repeat)."""

    epoch: int
    index: int
    repeat: int


class ImageBatches:
    def __init__(self, images: int, *, batch: int, group: int, repeats: int, seed: int) -> None:
        self.steps_per_epoch = images // batch
        if self.steps_per_epoch == 0:
            raise DataError(f"there are {images:,} training images, fewer than a batch of {batch:,}; lower train.batch")
        self._images, self._batch, self._group, self._repeats, self._seed = images, batch, group, repeats, seed
        self._order = lru_cache(maxsize=2)(self._compute_order)
        # Position in the batch, in the order of an epoch, of each example of the global batch.
        groups = batch // group
        self._positions = (np.arange(groups)[:, None] + groups * pair_order(group)[None, :]).reshape(-1)

    def examples(self, step: int, first: int, count: int) -> list[Example]:
        """Examples first to first + count of the global batch of `step`."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        found = []
        for position in self._positions[first : first + count]:
            image, repeat = divmod(inside * self._batch + int(position), self._repeats)
            found.append(Example(epoch, int(order[image]), repeat))
        return found

    def identity(self, step: int) -> str:
        epoch, inside = divmod(step, self.steps_per_epoch)
        return f"batch {inside} of {self.steps_per_epoch} of epoch {epoch} (seed {self._seed})"

    def _compute_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self._images)
