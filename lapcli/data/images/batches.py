"""The images of each step: a function of (seed, step), independent of processes and workers.

An epoch is a permutation of the images drawn by (seed, epoch), each repeated `repeats` times in a row, truncated to the
number of images. The last incomplete batch is dropped, which affects other images in each epoch. The positions of a
batch are assigned to its groups in turn, as timm's samplers assign them to GPUs, so that copies of an image are in
different groups. The random draws of an example are a function of its key, not of the process or the time.
"""

import hashlib
import random
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

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
        self._batch, self._repeats, self._seed = batch, repeats, seed
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(images))
        # For each example of the global batch, its position in the batch in the order of the epoch.
        groups = batch // group
        self._positions = (np.arange(groups)[:, None] + groups * pair_order(group)[None, :]).reshape(-1)

    def examples(self, step: int, first: int, count: int) -> list[Example]:
        """Return examples [first, first + count) of the global batch of `step`."""
        epoch, number = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        examples = []
        for position in self._positions[first : first + count]:
            image, repeat = divmod(number * self._batch + int(position), self._repeats)
            examples.append(Example(epoch, int(order[image]), repeat))
        return examples

    def identity(self, step: int) -> str:
        epoch, number = divmod(step, self.steps_per_epoch)
        return f"batch {number} of {self.steps_per_epoch} of epoch {epoch} (seed {self._seed})"


def seed_everything(*key: int) -> None:
    """Seed Python's, numpy's and torch's CPU generators; timm's and torchvision's transforms draw from all of them."""
    content = hashlib.blake2b(struct.pack(f"{len(key)}q", *key), digest_size=20).digest()
    for_python, for_numpy, for_torch = struct.unpack("<QIQ", content)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch % 2**63)


def pair_order(size: int) -> np.ndarray:
    """Return 0, n-1, 1, n-2, ..., where timm's partners i and n - 1 - i are neighbours."""
    order = np.empty(size, dtype=np.int64)
    order[0::2] = np.arange((size + 1) // 2)
    order[1::2] = size - 1 - np.arange(size // 2)
    return order
