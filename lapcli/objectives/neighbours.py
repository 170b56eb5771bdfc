"""Validation of self-supervised training: k-nearest-neighbour accuracy of the teacher's class token, without fitting.

Shapes: B images, N training and Q held-out images, C width."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lapcli.data.images.image_set import ImageSet, ImageSubset
from lapcli.data.images.sources import ImageData
from lapcli.measures.accuracy import evaluation_batches
from lapcli.measures.nearest_neighbours import classify
from lapcli.models.dino_vit import DinoViT
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.runtime.ranks import World

TEMPERATURE = 0.07  # of the votes, as in DINOv3's k-NN evaluation


@torch.no_grad()
def neighbour_accuracy(
    backbone: DinoViT, data: ImageData, recipe: SelfSupervisedRecipe, world: World, **options: Any
) -> float:
    """Return the accuracy on held-out images, classified by a similarity-weighted vote of their neighbours.

    Options are those of `evaluation_batches`.
    """
    section = recipe.validation
    keys, queries = _spread(data.train, section.train_images), _spread(data.validation, section.images)
    keys_NC, queries_QC = (class_tokens(backbone, part, recipe, world, **options) for part in (keys, queries))
    labels_N, labels_Q = (torch.from_numpy(part.labels).to(world.device) for part in (keys, queries))
    k = min(section.neighbours, len(keys))
    unit_keys_NC = F.normalize(keys_NC, dim=1)
    predicted_Q = classify(queries_QC, unit_keys_NC, labels_N, len(keys.classes), [k], TEMPERATURE)[k]
    return float((predicted_Q == labels_Q).float().mean())


def class_tokens(
    backbone: DinoViT, images: ImageSet, recipe: SelfSupervisedRecipe, world: World, **options: Any
) -> Tensor:
    """Return the class tokens of all images on every process; each computes some of them."""
    size, batch = recipe.data.crops.global_size, recipe.validation.batch or recipe.train.micro_batch
    tokens_NC = torch.zeros(len(images), backbone.width, device=world.device)
    for rows, images_BCHW, _ in evaluation_batches(images, recipe.data, size, world, batch, **options):
        tokens_NC[rows.start : rows.stop] = backbone(images_BCHW)[: len(rows)].float()
    if world.size > 1:
        dist.all_reduce(tokens_NC)  # each row is zero on all ranks but one, so the sum gathers them
    return tokens_NC


def _spread(images: ImageSet, most: int) -> ImageSet:
    if len(images) <= most:
        return images
    return ImageSubset(images, np.linspace(0, len(images) - 1, most).astype(np.int64))
