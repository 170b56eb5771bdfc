"""A frozen ViT as the probes see it (images in, class token and patches of the last block after the final norm out),
and its features of whole image sets and of training batches.

Images go through in chunks of a fixed size that the processes take in turn, so that one process and several compute
the very same chunks: features, and all that is made of them, do not depend on the number of processes.

Shapes: B images, N images of a whole set, P patches, D features.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Example, ImageBatches, ImageLoader, Reader, Transform
from lapcli.models.dino_vit import DinoViT
from lapcli.objectives.objective import LoadedModel
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World


class Backbone:
    """A frozen network from uint8 images, of any square size that its patches tile, to float32 features."""

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        width: int,
        patch: int,
        image: int,
        mean: Sequence[float],
        std: Sequence[float],
        has_class_token: bool,
        device: torch.device,
    ) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.name, self.width, self.patch, self.image = name, width, patch, image
        self.mean, self.std = list(mean), list(std)
        self.has_class_token, self.device = has_class_token, device

    def tokens(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class token (B, D) and the patches row by row (B, P, D) of normalised images."""
        raise NotImplementedError

    def at_size(self, size: int) -> "Backbone":
        """Return the same network for square images of `size` pixels a side."""
        return self

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor, bf16: bool = False) -> tuple[Tensor, Tensor]:
        """Return `tokens` of uint8 images, on the network's device; the mean patch replaces a missing class token."""
        device = self.device
        mean, std = (torch.tensor(x, device=device)[:, None, None] * 255 for x in (self.mean, self.std))
        normal_BCHW = images_BCHW.to(device).float().sub_(mean).div_(std)
        with ComputePolicy(device.type, bf16).autocast():
            class_BD, patches_BPD = self.tokens(normal_BCHW)
        # float32 before any classifier, as in DINOv3's eval/linear.py.
        class_BD, patches_BPD = class_BD.float(), patches_BPD.float()
        if not (torch.isfinite(class_BD).all() and torch.isfinite(patches_BPD).all()):
            raise LapError(f"{self.name} gives features that are not finite; these weights cannot be evaluated")
        return class_BD, patches_BPD


class TimmBackbone(Backbone):
    """timm's ViTs with absolute positions (VisionTransformer) or rotary ones (Eva, DINOv3)."""

    def __init__(
        self, model: Any, *, name: str, mean: Sequence[float], std: Sequence[float], device: torch.device
    ) -> None:
        from timm.models.eva import Eva
        from timm.models.vision_transformer import VisionTransformer

        if not isinstance(model, VisionTransformer | Eva):
            raise UsageError(
                f"{name} is a {type(model).__name__}; the probes need a plain ViT, timm's VisionTransformer or Eva"
            )
        patch, image = model.patch_embed.patch_size, model.patch_embed.img_size
        if patch[0] != patch[1] or image is None or image[0] != image[1]:
            raise UsageError(f"{name} takes images of {image} in patches of {patch}; the probes need squares")
        super().__init__(
            model,
            name=name,
            width=model.embed_dim,
            patch=patch[0],
            image=image[0],
            mean=mean,
            std=std,
            has_class_token=model.cls_token is not None,
            device=device,
        )

    def tokens(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        model: Any = self.model
        tokens_BTD = model.forward_features(images_BCHW)
        if isinstance(model.norm, nn.Identity):  # models that pool their patches have the final norm after the pooling
            tokens_BTD = model.fc_norm(tokens_BTD)
        patches_BPD = tokens_BTD[:, model.num_prefix_tokens :]
        return tokens_BTD[:, 0] if self.has_class_token else patches_BPD.mean(dim=1), patches_BPD

    def at_size(self, size: int) -> "TimmBackbone":
        """Return a copy for images of that size, with its learned positions interpolated."""
        # set_input_size replaces the positions in place, and other tasks use the original size.
        model: Any = copy.deepcopy(self.model)
        model.set_input_size(img_size=(size, size))
        return TimmBackbone(model, name=self.name, mean=self.mean, std=self.std, device=self.device)


class DinoBackbone(Backbone):
    """The teacher of a self-supervised run. Its rotary positions suit images of any size."""

    def tokens(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        model: Any = self.model
        return model.features(images_BCHW)[-1]


def backbone_of(loaded: LoadedModel) -> Backbone:
    """Return the backbone of a loaded model."""
    assert loaded.images is not None
    mean, std, device = loaded.images.mean, loaded.images.std, loaded.device
    name = loaded.name if loaded.run is None else str(loaded.run.path)
    if not isinstance(loaded.module, DinoViT):
        return TimmBackbone(loaded.module, name=name, mean=mean, std=std, device=device)
    return DinoBackbone(
        loaded.module,
        name=f"the teacher of {name}",
        width=loaded.module.width,
        patch=loaded.module.patch,
        image=loaded.image_size or 0,
        mean=mean,
        std=std,
        has_class_token=True,
        device=device,
    )


@dataclass(frozen=True)
class ForwardSettings:
    """How images are passed through a network: processes, batch, loader workers, precision."""

    world: World
    batch: int  # images in one forward of a process
    workers: int = 0
    bf16: bool = False
    progress: Progress | None = None

    def shares(self, count: int) -> list[range]:
        """Return the positions among `count` that this process takes in each of its turns; the last may be empty."""
        return self.world.shares(count, self.batch)

    def together(self, rows: Tensor) -> Tensor:
        """Combine rows of which each process filled some and left the others 0; in place, and exact: x + 0 = x."""
        if self.world.size > 1:
            dist.all_reduce(rows)
        return rows


def class_token(class_BD: Tensor, patches_BPD: Tensor) -> Tensor:
    return class_BD


def class_token_and_mean_patch(class_BD: Tensor, patches_BPD: Tensor) -> Tensor:
    return torch.cat([class_BD, patches_BPD.mean(dim=1)], dim=1)


Feature = Callable[[Tensor, Tensor], Tensor]


def batches_of_features(
    backbone: Backbone, images: ImageSet, transform: Transform, feature: Feature, how: ForwardSettings, doing: str
) -> Iterator[tuple[range, Tensor]]:
    """Yield positions in the set and their features, for the chunks of this process that are not empty."""
    shares = how.shares(len(images))

    def examples(turn: int, _: int) -> list[Example]:
        return [Example(0, index, 0) for index in shares[turn]]

    reader = Reader(images, transform, backbone.image, None)
    loader = ImageLoader(reader, examples, micro_steps=1, last=(len(shares) - 1, 0), workers=how.workers)
    try:
        for turn, positions in enumerate(shares):
            images_BCHW, _ = loader.batch(turn, 0)
            if positions:
                yield positions, feature(*backbone(images_BCHW, how.bf16))
            if how.progress:
                how.progress(doing, turn + 1, len(shares))
    finally:
        loader.close()


def all_features(
    backbone: Backbone,
    images: ImageSet,
    transform: Transform,
    feature: Feature,
    width: int,
    how: ForwardSettings,
    doing: str,
) -> Tensor:
    """Return the (N, width) features of the whole set, on every process."""
    features_ND = torch.zeros(len(images), width, device=backbone.device)
    for positions, features_BD in batches_of_features(backbone, images, transform, feature, how, doing):
        features_ND[positions.start : positions.stop] = features_BD
    return how.together(features_ND)


class TrainingFeatures:
    """Features of each step's batch, augmented by (seed, epoch, image); the whole batch on every process."""

    def __init__(
        self,
        backbone: Backbone,
        images: ImageSet,
        transform: Transform,
        feature: Feature,
        width: int,
        how: ForwardSettings,
        *,
        batch: int,
        steps: int,
        seed: int,
    ) -> None:
        if batch > len(images):
            raise UsageError(
                f"there are {len(images):,} training images, fewer than a batch of {batch:,}; use --set linear.batch="
                f"{2 ** int(math.log2(max(1, len(images) // 4)))}"  # a power of two, at least four batches an epoch
            )
        self._backbone, self._feature, self._width, self._how, self._batch = backbone, feature, width, how, batch
        self._order = ImageBatches(len(images), batch=batch, group=1, repeats=1, seed=seed)
        self._labels_N = torch.from_numpy(images.labels)
        self._shares = how.shares(batch)
        turns = len(self._shares)
        reader = Reader(images, transform, backbone.image, seed)
        self._loader = ImageLoader(
            reader, self._examples, micro_steps=turns, last=(steps - 1, turns - 1), workers=how.workers
        )

    def _examples(self, step: int, turn: int) -> list[Example]:
        share = self._shares[turn]
        return self._order.examples(step, share.start, len(share))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (B, width) features and B labels."""
        device = self._backbone.device
        features_BD = torch.zeros(self._batch, self._width, device=device)
        for turn, share in enumerate(self._shares):
            # Also for an empty share: the workers prefetch in order, and a request left out would restart them.
            images_BCHW, _ = self._loader.batch(step, turn)
            if share:
                features_BD[share.start : share.stop] = self._feature(*self._backbone(images_BCHW, self._how.bf16))
        # Labels of the whole batch, of which the loader reads only this process's share.
        examples = self._order.examples(step, 0, self._batch)
        labels_B = self._labels_N[[example.index for example in examples]].to(device)
        return self._how.together(features_BD), labels_B

    def close(self) -> None:
        self._loader.close()


def evenly_spaced(count: int, limit: int | None) -> Sequence[int] | None:
    """Return `limit` positions spread evenly over `count`; None for all of them."""
    if limit is None or limit >= count:
        return None
    return [round(position * (count - 1) / max(1, limit - 1)) for position in range(limit)]
