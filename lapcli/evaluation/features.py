"""Frozen features of images, each image read and passed through the network once, whoever needs its features.

Images go through in chunks of a fixed size that the processes take in turn, so that one process and several compute
the very same chunks: features, and all that is made of them, do not depend on the number of processes.

Shapes: B images, N images of a whole set, P patches, D features.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lapcli.data.images.batches import Example, ImageBatches
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import ImageLoader, Reader, Transform
from lapcli.evaluation.backbones import Backbone
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World


@dataclass(frozen=True)
class Pass:
    """How images go through a network."""

    world: World
    batch: int  # images a process takes at once
    workers: int = 0
    bf16: bool = False
    progress: Progress | None = None

    def chunk(self, turn: int, count: int) -> range:
        """Positions among `count` that this process takes in its turn; none if they have run out."""
        first = min(count, (turn * self.world.size + self.world.rank) * self.batch)
        return range(first, min(count, first + self.batch))

    def turns(self, count: int) -> int:
        """The same number on every process."""
        return math.ceil(count / (self.batch * self.world.size))

    def together(self, rows: Tensor) -> Tensor:
        """Rows that each process filled some of and left 0 elsewhere, whole on every process; exact, in place."""
        if self.world.size > 1:
            dist.all_reduce(rows)
        return rows


def class_token(class_BD: Tensor, patches_BPD: Tensor) -> Tensor:
    return class_BD


def class_token_and_mean_patch(class_BD: Tensor, patches_BPD: Tensor) -> Tensor:
    return torch.cat([class_BD, patches_BPD.mean(dim=1)], dim=1)


Feature = Callable[[Tensor, Tensor], Tensor]


def batches_of_features(
    backbone: Backbone, images: ImageSet, transform: Transform, feature: Feature, how: Pass, doing: str
) -> Iterator[tuple[range, Tensor]]:
    """Positions in the set and their features, for the chunks of this process; some are empty."""
    count = len(images)
    turns = how.turns(count)

    def examples(turn: int, _: int) -> list[Example]:
        return [Example(0, index, 0) for index in how.chunk(turn, count)]

    reader = Reader(images, transform, backbone.image, None)
    loader = ImageLoader(reader, examples, micro_steps=1, last=(turns - 1, 0), workers=how.workers)
    try:
        for turn in range(turns):
            images_BCHW, _ = loader.batch(turn, 0)
            positions = how.chunk(turn, count)
            if len(positions):
                yield positions, feature(*backbone(images_BCHW, how.bf16))
            if how.progress:
                how.progress(doing, turn + 1, turns)
    finally:
        loader.close()


def all_features(
    backbone: Backbone, images: ImageSet, transform: Transform, feature: Feature, width: int, how: Pass, doing: str
) -> Tensor:
    """(N, width) features of the whole set, on every process."""
    found_ND = torch.zeros(len(images), width, device=backbone.device)
    for positions, features_BD in batches_of_features(backbone, images, transform, feature, how, doing):
        found_ND[positions.start : positions.stop] = features_BD
    return how.together(found_ND)


class TrainingFeatures:
    """Features of the batch of a step, augmented by (seed, epoch, image): the whole batch on every process."""

    def __init__(
        self,
        backbone: Backbone,
        images: ImageSet,
        transform: Transform,
        feature: Feature,
        width: int,
        how: Pass,
        *,
        batch: int,
        steps: int,
        seed: int,
    ) -> None:
        if batch > len(images):
            raise UsageError(
                f"there are {len(images):,} training images, fewer than a batch of {batch:,}; use --set linear.batch="
                f"{2 ** int(math.log2(max(1, len(images) // 4)))}"
            )
        self._backbone, self._feature, self._width, self._how, self._batch = backbone, feature, width, how, batch
        self._order = ImageBatches(len(images), batch=batch, group=1, repeats=1, seed=seed)
        self._labels_N = torch.from_numpy(images.labels)
        self._turns = how.turns(batch)
        reader = Reader(images, transform, backbone.image, seed)
        self._loader = ImageLoader(
            reader, self._examples, micro_steps=self._turns, last=(steps - 1, self._turns - 1), workers=how.workers
        )

    def _examples(self, step: int, turn: int) -> list[Example]:
        chunk = self._how.chunk(turn, self._batch)
        return self._order.examples(step, chunk.start, len(chunk))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """(B, width) features and B labels."""
        device = self._backbone.device
        found_BD = torch.zeros(self._batch, self._width, device=device)
        for turn in range(self._turns):
            images_BCHW, _ = self._loader.batch(step, turn)
            chunk = self._how.chunk(turn, self._batch)
            if len(chunk):
                found_BD[chunk.start : chunk.stop] = self._feature(*self._backbone(images_BCHW, self._how.bf16))
        examples = self._order.examples(step, 0, self._batch)
        labels_B = self._labels_N[[example.index for example in examples]].to(device)
        return self._how.together(found_BD), labels_B

    def close(self) -> None:
        self._loader.close()


def spread(count: int, limit: int | None) -> Sequence[int] | None:
    """`limit` positions evenly over `count`; None for all of them."""
    if limit is None or limit >= count:
        return None
    return [round(position * (count - 1) / max(1, limit - 1)) for position in range(limit)]
