"""Image classification with a ViT: mixed images, soft targets, cross entropy or binary cross entropy, top-1 and top-5.

Shapes: B images, K classes.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from lapcli.data.images.augmentation import Eraser, Mixer, evaluation_transform, normalise, training_transform
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Example, ImageBatches, ImageLoader, Reader, count_workers
from lapcli.data.images.sources import ImageData
from lapcli.measures.accuracy import measure_accuracy
from lapcli.measures.smoothing import PROBE_IMAGES, smoothing
from lapcli.models import compiling
from lapcli.models.vit import build_vit, forward_flops, without_decay
from lapcli.objectives.objective import ParameterGroup, decay_groups, plan_batches
from lapcli.objectives.schedules import cosine_multiplier
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.recipe.vision import ClassificationRecipe, ImageFiles
from lapcli.runtime.devices import ComputePolicy, compute_policy, to_device
from lapcli.runtime.errors import UsageError
from lapcli.runtime.machine import check_compiler, check_shared_memory
from lapcli.runtime.ranks import World


def parameter_groups(recipe: ClassificationRecipe, model: nn.Module) -> list[ParameterGroup]:
    return decay_groups(recipe.optimizer, dict(model.named_parameters()), without_decay(model))


def build_loss(recipe: ClassificationRecipe) -> nn.Module:
    """Return a loss of logits and class shares. Binary: a class with any share is a target of 1, whatever lambda is."""
    if recipe.train.loss == "binary_cross_entropy":
        # Smoothing has to be 0: it gives every class a share, and beyond the threshold of 0 all targets would be 1.
        return BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0, sum_classes=False)
    return SoftTargetCrossEntropy()


def worker_count(recipe: ClassificationRecipe | SelfSupervisedRecipe, device: torch.device) -> int:
    return count_workers(recipe.data.workers, device)


def check_room_for_workers(loader: ImageLoader, loaders: int) -> None:
    """Check that shared memory fits the batches prefetched by the workers of all local processes, for `loaders`."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_shared_memory(local_size * loaders * loader.bytes_ahead(), loader.workers)


def probe_images(images: ImageSet, source: ImageFiles, size: int) -> Tensor:
    """Return a few images spread over a set, transformed as for evaluation, for `validation.smoothing`."""
    spread = np.unique(np.linspace(0, len(images) - 1, min(PROBE_IMAGES, len(images))).astype(int))
    reader = Reader(images, evaluation_transform(source, size), size, None)
    return normalise(reader.read([Example(0, int(index), 0) for index in spread])[0], source)


class ClassificationStep:
    """The model and its loss, which need no data: a run trains them, a plan traces them on the meta device."""

    def __init__(self, recipe: ClassificationRecipe, device: torch.device, policy: ComputePolicy) -> None:
        self._policy, self._criterion = policy, build_loss(recipe)
        # Drawn on the CPU, so that one seed gives the same weights on every device.
        with device if device.type == "meta" else contextlib.nullcontext():
            model = build_vit(recipe.model, recipe.seed)
        self.model = model.to(device).train()
        if policy.compiles:
            check_compiler(device.type)
            self.model.compile(**compiling.OPTIONS)  # in place, so that no name gets the prefix `_orig_mod.`

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images_BCHW, targets_BK = batch
        with self._policy.autocast():
            logits_BK = self.model(images_BCHW)
        return self._criterion(logits_BK.float(), targets_BK)  # autocast gives bf16 logits; the loss is in float32


class Classification:
    unit = "images"
    best_metric = "validation_top1"

    def __init__(
        self, recipe: ClassificationRecipe, data: ImageData, world: World, policy: ComputePolicy | None = None
    ) -> None:
        self._recipe, self._data, self._world = recipe, data, world
        train, section, augmentation = recipe.train, recipe.model, recipe.data.augmentation
        self._policy = policy or compute_policy(world.device, train.precision, train.compile)
        self._mixer = Mixer(
            recipe.data.mixing, classes=section.classes, image=section.image, batch=train.batch, seed=recipe.seed
        )
        self.batches = plan_batches(
            train.batch, train.micro_batch, world.size, multiple=2 if recipe.data.mixing.is_on else 1
        )
        self._images = ImageBatches(
            len(data.train),
            batch=train.batch,
            group=self._mixer.group,
            repeats=augmentation.repeats,
            seed=recipe.seed,
        )
        self.steps = train.steps or max(1, int((train.epochs or 0) * self._images.steps_per_epoch))
        self._loader = ImageLoader(
            Reader(data.train, training_transform(recipe.data, section.image), section.image, recipe.seed),
            self._examples,
            micro_steps=self.batches.accumulation,
            last=(self.steps - 1, self.batches.accumulation - 1),
            workers=worker_count(recipe, world.device),
            device=world.device,
        )
        check_room_for_workers(self._loader, loaders=2)  # training and validation
        self._eraser = Eraser(augmentation.erase) if augmentation.erase else None
        self._step = ClassificationStep(recipe, world.device, self._policy)
        self.model = self._step.model
        self.units_per_step = train.batch
        self.flops_per_step = 3.0 * forward_flops(section) * train.batch  # a backward costs two forwards

    def parameter_groups(self) -> list[ParameterGroup]:
        return parameter_groups(self._recipe, self.model)

    def _examples(self, step: int, micro_step: int) -> list[Example]:
        first = self.batches.first(micro_step, self._world.rank)
        return self._images.examples(step, first, self.batches.micro_batch)

    def batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """Return normalised, erased and mixed images, and the share of each class in them."""
        images_BCHW, labels_B = self._loader.batch(step, micro_step)
        if self._eraser:  # it draws on the CPU, before the copy: images from the GPU would make the host wait
            keys = [(self._recipe.seed, e.epoch, e.index, e.repeat) for e in self._examples(step, micro_step)]
            images_BCHW = self._eraser(normalise(images_BCHW, self._recipe.data), keys)
        images_BCHW, labels_B = to_device((images_BCHW, labels_B), self._world.device)
        if not self._eraser:
            images_BCHW = normalise(images_BCHW, self._recipe.data)
        return self._mixer(images_BCHW, labels_B, step, self.batches.first(micro_step, self._world.rank))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._step.loss(batch)

    def learning_rate_multiplier(self, step: int) -> float:
        return cosine_multiplier(
            self._recipe.schedule, self._recipe.optimizer.lr, step, self.steps, self._images.steps_per_epoch
        )

    def refuse_long_warmup(self) -> None:
        """Raise UsageError for a warm-up that is not shorter than the run."""
        epochs, per_epoch = self._recipe.schedule.warmup_epochs, self._images.steps_per_epoch
        if epochs and epochs * per_epoch >= self.steps:
            raise UsageError(
                f"schedule.warmup_epochs {epochs:g} is {epochs * per_epoch:,.0f} steps ({per_epoch:,} an epoch), which "
                f"do not fit into a run of {self.steps:,} steps; lower it, such as with --set schedule.warmup_epochs=0"
            )

    def after_step(self, step: int) -> None:
        pass

    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        size = self._recipe.validation.batch or self._recipe.train.micro_batch
        with self._policy.autocast():
            accuracy = measure_accuracy(
                self.model,
                self._data.validation,
                self._recipe.data,
                self._recipe.model.image,
                self._world,
                size,
                workers=self._loader.workers,
                pads=self._policy.compiles,
                stop_if_asked=stop_if_asked,
            )
        values = {
            "validation_loss": accuracy.loss,
            "validation_top1": accuracy.top(1),
            "validation_top5": accuracy.top(5),
        }
        if self._recipe.validation.smoothing:
            probe_BCHW = probe_images(self._data.validation, self._recipe.data, self._recipe.model.image)
            values |= smoothing(self.model, probe_BCHW.to(self._world.device))
        return values

    def describe_batch(self, step: int) -> str:
        return self._images.identity(step)

    def weights_metadata(self) -> dict[str, str]:
        return {"laplacian_heads": str(self._recipe.model.head_plan())}

    def finish(self, run_dir: Path) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._loader.close()
