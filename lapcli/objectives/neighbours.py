"""Validation of self-supervised training: k-nearest-neighbour accuracy of the teacher's class token, without fitting.

Shapes: B images, N training and Q held-out images, C width."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lapcli.data.images.augmentation import evaluation_transform, normalise
from lapcli.data.images.image_set import ImageSet, ImageSubset
from lapcli.data.images.loader import Example, ImageLoader, Reader
from lapcli.data.images.sources import ImageData
from lapcli.measures.nearest_neighbours import classify
from lapcli.models.compiling import pad_rows
from lapcli.models.dino_vit import DinoViT
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.runtime.devices import to_device
from lapcli.runtime.ranks import World

TEMPERATURE = 0.07  # of the votes, as in DINOv3's k-NN evaluation


@torch.no_grad()
def neighbour_accuracy(
    backbone: DinoViT,
    data: ImageData,
    recipe: SelfSupervisedRecipe,
    world: World,
    *,
    workers: int = 0,
    pads: bool = False,
    stop_if_asked: Callable[[], None] | None = None,
) -> float:
    """Return the accuracy on held-out images, by a vote of their neighbours weighted by similarity."""
    section = recipe.validation
    keys, queries = _spread(data.train, section.train_images), _spread(data.validation, section.images)
    keys_NC, queries_QC = (
        class_tokens(backbone, part, recipe, world, workers=workers, pads=pads, stop_if_asked=stop_if_asked)
        for part in (keys, queries)
    )
    labels_N, labels_Q = (torch.from_numpy(part.labels).to(world.device) for part in (keys, queries))
    k = min(section.neighbours, len(keys))
    unit_keys_NC = F.normalize(keys_NC, dim=1)
    predicted_Q = classify(queries_QC, unit_keys_NC, labels_N, len(keys.classes), [k], TEMPERATURE)[k]
    return float((predicted_Q == labels_Q).float().mean())


def class_tokens(
    backbone: DinoViT,
    images: ImageSet,
    recipe: SelfSupervisedRecipe,
    world: World,
    *,
    workers: int = 0,
    pads: bool = False,
    stop_if_asked: Callable[[], None] | None = None,
) -> Tensor:
    """Return the class tokens of all images on every process; each computes a share of them.

    `pads`: the last batch is padded, so that all batches have the same shape.
    """
    size, batch = recipe.data.crops.global_size, recipe.validation.batch or recipe.train.micro_batch
    reader = Reader(images, evaluation_transform(recipe.data, size), size, None)
    tokens_NC = torch.zeros(len(images), backbone.width, device=world.device)
    shares = world.shares(len(images), batch)

    def examples(turn: int, _: int) -> list[Example]:
        return [Example(0, index, 0) for index in shares[turn]]

    loader = ImageLoader(
        reader, examples, micro_steps=1, last=(len(shares) - 1, 0), workers=workers, device=world.device
    )
    try:
        for turn, rows in enumerate(shares):
            if stop_if_asked is not None:
                stop_if_asked()
            images_BCHW, _ = loader.batch(turn, 0)
            if not rows:
                continue
            if pads:
                images_BCHW = pad_rows(images_BCHW, batch)
            (images_BCHW,) = to_device([images_BCHW], world.device)
            tokens_BC = backbone(normalise(images_BCHW, recipe.data))
            tokens_NC[rows.start : rows.stop] = tokens_BC[: len(rows)].float()
    finally:
        loader.close()
    if world.size > 1:
        dist.all_reduce(tokens_NC)  # each row is zero on all ranks but one, so the sum gathers them
    return tokens_NC


def _spread(images: ImageSet, most: int) -> ImageSet:
    if len(images) <= most:
        return images
    return ImageSubset(images, np.linspace(0, len(images) - 1, most).astype(np.int64))
