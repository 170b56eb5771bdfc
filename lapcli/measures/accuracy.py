"""Top-k accuracy over every image of a set, independent of the batch size and the number of processes.

Shapes: B images, K classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.data.images.augmentation import evaluation_transform, normalise
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Example, ImageLoader, Reader
from lapcli.models.compiling import pad_rows
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.devices import to_device
from lapcli.runtime.errors import LapError
from lapcli.runtime.ranks import World

TOP = (1, 5)
NO_CLASS = -1  # label of a padding image, which is not counted


@dataclass(frozen=True)
class Accuracy:
    images: int
    correct: dict[int, int]  # for each k, the number of images whose class is among the top k
    loss: float  # mean cross entropy

    def top(self, k: int) -> float:
        return self.correct[k] / self.images


def evaluation_batches(
    images: ImageSet,
    source: ImageFiles,
    size: int,
    world: World,
    batch: int,
    *,
    workers: int = 0,
    pads: bool = False,
    stop_if_asked: Callable[[], None] | None = None,
) -> Iterator[tuple[range, Tensor, Tensor]]:
    """Yield this process's part of the images in batches: their positions, the normalised images, and their labels.

    `source` determines how images are cropped and normalised, `size` is their side in pixels.
    `pads`: the last batch is padded with images of no class, so that all batches have the same shape.
    """
    shares = world.shares(len(images), batch)

    def examples(turn: int, _: int) -> list[Example]:
        return [Example(0, index, 0) for index in shares[turn]]

    reader = Reader(images, evaluation_transform(source, size), size, None)
    loader = ImageLoader(
        reader, examples, micro_steps=1, last=(len(shares) - 1, 0), workers=workers, device=world.device
    )
    try:
        for turn, rows in enumerate(shares):
            if stop_if_asked is not None:
                # Called for its exception. A collective: every rank calls it in every turn, even with an empty share.
                stop_if_asked()
            images_BCHW, labels_B = loader.batch(turn, 0)
            if not rows:
                continue
            if pads:
                images_BCHW, labels_B = pad_rows(images_BCHW, batch), pad_rows(labels_B, batch, NO_CLASS)
            images_BCHW, labels_B = to_device((images_BCHW, labels_B), world.device)
            yield rows, normalise(images_BCHW, source), labels_B
    finally:
        loader.close()


@torch.no_grad()
def measure_accuracy(
    model: nn.Module,
    images: ImageSet,
    source: ImageFiles,
    size: int,
    world: World,
    batch: int,
    **options: Any,
) -> Accuracy:
    """Measure the accuracy with each image counted once over all processes; the model's mode is restored.

    Arguments are those of `evaluation_batches`.
    """
    was_training = model.training
    model.eval()
    seen = nats = 0.0
    correct = dict.fromkeys(TOP, 0.0)
    try:
        for rows, images_BCHW, labels_B in evaluation_batches(images, source, size, world, batch, **options):
            logits_BK = model(images_BCHW).float()
            if not torch.isfinite(logits_BK).all():
                raise LapError("the model produces logits that are not finite; these weights cannot be evaluated")
            nats += float(F.cross_entropy(logits_BK, labels_B, reduction="sum", ignore_index=NO_CLASS))
            seen += len(rows)
            # topk never returns the index NO_CLASS, so padding hits nothing.
            hits_BK = logits_BK.topk(min(max(TOP), logits_BK.shape[1]), dim=1).indices == labels_B[:, None]
            for k in TOP:
                correct[k] += int(hits_BK[:, :k].sum())  # column j: whether the j-th guess is right
    finally:
        model.train(was_training)
    seen, nats, *counts = world.sum([seen, nats, *correct.values()])
    return Accuracy(int(seen), {k: int(count) for k, count in zip(TOP, counts, strict=True)}, nats / seen)
