"""Top-k accuracy over every image of a set, independent of the batch size and the number of processes; and k-NN
classification by cosine similarity, in chunks, whose memory does not grow with queries times keys.

Shapes: B images, K classes; Q queries, N keys (training images), D features, M neighbours kept.
"""

from collections.abc import Callable, Iterator, Sequence
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
#: Size of a chunk: 512 queries against 16,384 keys are 32 MiB of similarities.
QUERIES_AT_ONCE, KEYS_AT_ONCE = 512, 16_384


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
    `pads`: the last batch is padded with unlabelled images, so that all batches have the same shape.
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
                # Called for its exception. A collective: every rank calls it in every turn, even with an empty part.
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
            # topk never returns the index NO_CLASS, so padding is never counted.
            hits_BK = logits_BK.topk(min(max(TOP), logits_BK.shape[1]), dim=1).indices == labels_B[:, None]
            for k in TOP:
                correct[k] += int(hits_BK[:, :k].sum())  # column j: whether the j-th guess is right
    finally:
        model.train(was_training)
    seen, nats, *counts = world.sum([seen, nats, *correct.values()])
    return Accuracy(int(seen), {k: int(count) for k, count in zip(TOP, counts, strict=True)}, nats / seen)


def nearest(queries_QD: Tensor, keys_ND: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return the inner products with the nearest keys, largest first, and those keys' indices; both Q x neighbours."""
    best_QM = queries_QD.new_empty(len(queries_QD), 0)
    index_QM = torch.empty(len(queries_QD), 0, dtype=torch.int64, device=queries_QD.device)
    for first in range(0, len(keys_ND), KEYS_AT_ONCE):
        similarity_QN = queries_QD @ keys_ND[first : first + KEYS_AT_ONCE].T
        nearest_here = similarity_QN.topk(min(neighbours, similarity_QN.shape[1]), dim=1)
        # At most 2 M columns: the best so far and the best of this chunk.
        both_QM = torch.cat([best_QM, nearest_here.values], dim=1)
        indices_QM = torch.cat([index_QM, nearest_here.indices + first], dim=1)
        best_QM, kept_QM = both_QM.topk(min(neighbours, both_QM.shape[1]), dim=1)
        index_QM = indices_QM.gather(1, kept_QM)
    return best_QM, index_QM


def classify(
    queries_QD: Tensor, unit_keys_ND: Tensor, labels_N: Tensor, classes: int, counts: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Return the class of each query by its first k neighbours, for each k of `counts`.

    Queries are normalised here. Keys must have length 1: they are normalised once for all query batches. A
    neighbour's vote has the weight exp(similarity / temperature), normalised over the neighbours kept, which does not
    affect the argmax.
    """
    queries_QD = F.normalize(queries_QD, dim=1)
    classes_of_k: dict[int, list[Tensor]] = {k: [] for k in counts}
    for first in range(0, len(queries_QD), QUERIES_AT_ONCE):
        similarity_QM, index_QM = nearest(queries_QD[first : first + QUERIES_AT_ONCE], unit_keys_ND, max(counts))
        weight_QM, labels_QM = F.softmax(similarity_QM / temperature, dim=1), labels_N[index_QM]
        score_QK, done = weight_QM.new_zeros(len(weight_QM), classes), 0
        for k in sorted(counts):
            score_QK.scatter_add_(1, labels_QM[:, done:k], weight_QM[:, done:k])
            classes_of_k[k].append(score_QK.argmax(dim=1))
            done = k
    return {k: torch.cat(parts) for k, parts in classes_of_k.items()}
