"""A frozen ViT for probes (from images to the class token and patches of the last block after the final norm),
and its features of complete image sets and training batches.

Images are processed in fixed-size chunks that the processes take in turn, so that any number of processes
computes the same chunks, features and results.

Shapes: B images, N images of a complete set, P patches, D features.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lapcli.data.images.augmentation import normalise
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Example, ImageBatches, ImageLoader, Reader
from lapcli.measures.accuracy import evaluation_batches
from lapcli.models.dino_vit import DinoViT
from lapcli.objectives.objective import LoadedModel
from lapcli.recipe.vision import ImageSource
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World


class Backbone:
    """A frozen ViT from uint8 images, of any square size divisible into patches, to float32 features.

    The classifier of a run, a timm ViT, or the teacher of a self-supervised run, whose rotary positions suit images of
    any size.
    """

    def __init__(
        self, model: Any, *, name: str, mean: Sequence[float], std: Sequence[float], device: torch.device, image: int
    ) -> None:
        self.model: Any = model.to(device).eval().requires_grad_(False)
        self.name, self.mean, self.std, self.device, self.image = name, list(mean), list(std), device, image
        is_teacher = isinstance(model, DinoViT)
        self.width = model.width if is_teacher else model.embed_dim
        self.patch = model.patch if is_teacher else model.patch_embed.patch_size[0]

    def tokens(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class token (B, D) and the patches row by row (B, P, D) of normalised images."""
        model = self.model
        if isinstance(model, DinoViT):
            (tokens_BTD,) = model.tokens([images_BCHW])
            return tokens_BTD[:, 0], tokens_BTD[:, 1:]
        tokens_BTD = model.forward_features(images_BCHW)
        return tokens_BTD[:, 0], tokens_BTD[:, model.num_prefix_tokens :]

    def at_size(self, size: int) -> "Backbone":
        """Return the same network for square images with `size` pixels per side; learned positions are interpolated."""
        if not hasattr(self.model, "set_input_size"):
            return self
        # set_input_size replaces the positions in place, and other tasks use the original size.
        model = copy.deepcopy(self.model)
        model.set_input_size(img_size=(size, size))
        return Backbone(model, name=self.name, mean=self.mean, std=self.std, device=self.device, image=size)

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor, bf16: bool = False) -> tuple[Tensor, Tensor]:
        """Return `tokens` of uint8 images, on the network's device."""
        return self.features(normalise(images_BCHW.to(self.device), source_of(self)), bf16)

    @torch.inference_mode()
    def features(self, normal_BCHW: Tensor, bf16: bool = False) -> tuple[Tensor, Tensor]:
        """Return `tokens` of normalised images in float32, as any classifier takes them (DINOv3's eval/linear.py)."""
        with ComputePolicy(self.device.type, bf16).autocast():
            class_BD, patches_BPD = self.tokens(normal_BCHW)
        class_BD, patches_BPD = class_BD.float(), patches_BPD.float()
        if not (torch.isfinite(class_BD).all() and torch.isfinite(patches_BPD).all()):
            raise LapError(f"{self.name} produces features that are not finite; these weights cannot be evaluated")
        return class_BD, patches_BPD


def source_of(backbone: Backbone, **settings: Any) -> ImageSource:
    """Return settings in the form expected by transforms; the image source is not used."""
    return ImageSource(train="builtin", validation=0.5, mean=backbone.mean, std=backbone.std, **settings)


def backbone_of(loaded: LoadedModel) -> Backbone:
    assert loaded.images is not None
    mean, std, image = loaded.images.mean, loaded.images.std, loaded.image_size or 0
    return Backbone(loaded.module, name=loaded.name, mean=mean, std=std, device=loaded.device, image=image)


@dataclass(frozen=True)
class ForwardSettings:
    """Settings for passing images through a network: processes, batch, loader workers, precision."""

    world: World
    batch: int  # images in one forward of a process
    workers: int = 0
    bf16: bool = False
    progress: Progress | None = None

    def shares(self, count: int) -> list[range]:
        """Return the positions below `count` assigned to this process in each turn; the last may be empty."""
        return self.world.shares(count, self.batch)

    def together(self, rows: Tensor) -> Tensor:
        """Combine rows that each process filled in part and left 0 elsewhere; in place, and exact: x + 0 = x."""
        if self.world.size > 1:
            dist.all_reduce(rows)
        return rows


def class_token(class_BD: Tensor, patches_BPD: Tensor) -> Tensor:
    return class_BD


def class_token_and_mean_patch(class_BD: Tensor, patches_BPD: Tensor) -> Tensor:
    return torch.cat([class_BD, patches_BPD.mean(dim=1)], dim=1)


Feature = Callable[[Tensor, Tensor], Tensor]


def batches_of_features(
    backbone: Backbone, images: ImageSet, crop_ratio: float, feature: Feature, how: ForwardSettings, doing: str
) -> Iterator[tuple[range, Tensor]]:
    """Yield positions in the set and their features, for the chunks of this process that are not empty."""
    source = source_of(backbone, crop_ratio=crop_ratio)
    for positions, normal_BCHW, _ in evaluation_batches(
        images, source, backbone.image, how.world, how.batch, workers=how.workers
    ):
        yield positions, feature(*backbone.features(normal_BCHW, how.bf16))
        if how.progress:
            how.progress(doing, positions.stop, len(images))


def all_features(
    backbone: Backbone,
    images: ImageSet,
    crop_ratio: float,
    feature: Feature,
    width: int,
    how: ForwardSettings,
    doing: str,
) -> Tensor:
    """Return the (N, width) features of the complete set, on every process."""
    features_ND = torch.zeros(len(images), width, device=backbone.device)
    for positions, features_BD in batches_of_features(backbone, images, crop_ratio, feature, how, doing):
        features_ND[positions.start : positions.stop] = features_BD
    return how.together(features_ND)


class SharedBatches:
    """Training batches in shuffled order; each process reads its own part of each turn."""

    def __init__(
        self, reader: Reader, count: int, how: ForwardSettings, *, batch: int, steps: int, seed: int, key: str
    ) -> None:
        if batch > count:
            raise UsageError(
                f"there are {count:,} training images, fewer than a batch of {batch:,}; use --set {key}.batch="
                f"{2 ** int(math.log2(max(1, count // 4)))}"  # a power of two, at least four batches an epoch
            )
        self._batch, self._shares = batch, how.shares(batch)
        self._order = ImageBatches(count, batch=batch, group=1, repeats=1, seed=seed)
        turns = len(self._shares)
        self._loader = ImageLoader(
            reader, self._examples, micro_steps=turns, last=(steps - 1, turns - 1), workers=how.workers
        )

    def _examples(self, step: int, turn: int) -> list[Example]:
        share = self._shares[turn]
        return self._order.examples(step, share.start, len(share))

    def turns(self, step: int) -> Iterator[tuple[range, Tensor, Tensor]]:
        """Yield positions in the batch with their images and labels."""
        for turn, share in enumerate(self._shares):
            # Also for an empty part: the workers prefetch in order, and a skipped request would restart them.
            images_BCHW, labels = self._loader.batch(step, turn)
            if share:
                yield share, images_BCHW, labels

    def indices(self, step: int) -> list[int]:
        """Return the examples of the complete batch over all processes."""
        return [example.index for example in self._order.examples(step, 0, self._batch)]

    def close(self) -> None:
        self._loader.close()


def evenly_spaced(count: int, limit: int | None) -> Sequence[int] | None:
    """Return `limit` positions spread evenly over `count`; None for all of them."""
    if limit is None or limit >= count:
        return None
    return [round(position * (count - 1) / max(1, limit - 1)) for position in range(limit)]
