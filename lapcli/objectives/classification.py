"""Image classification with a ViT: mixed images, soft targets, cross entropy or binary cross entropy, top-1 and top-5.

The base of objectives on images, with their data, workers and loading, is here too.

Shapes: B images, K classes.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from lapcli.checkpoint import Checkpoint, load_weights
from lapcli.data.images.augmentation import Mixer, normalise, training_transform
from lapcli.data.images.loader import Example, ImageBatches, ImageLoader, Reader, count_workers, seconds_to_read
from lapcli.data.images.sources import ImageData, open_images
from lapcli.data.sources import known_images
from lapcli.measures.accuracy import measure_accuracy
from lapcli.models import compiling
from lapcli.models.vit import build_vit, without_decay
from lapcli.objectives.objective import LoadedModel, Objective, ParameterGroup, PlanFacts, decay_groups
from lapcli.objectives.schedules import cosine_multiplier
from lapcli.objectives.weights import Weights
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.runs import Run
from lapcli.runtime.devices import ComputePolicy, compute_policy, to_device
from lapcli.runtime.environment import check_compiler
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World

R = TypeVar("R", ClassificationRecipe, SelfSupervisedRecipe)


class ImageObjective(Objective[R]):
    """Training on images. A subclass sets `image_size` (pixels of a side), `classes` (None: any number), and `use`."""

    unit = "images"
    classes: int | None = None
    image_size: int
    _images: ImageBatches
    _loader: ImageLoader

    def prepare(self, world: World, run: Run, initial: Weights | None) -> dict[str, Any]:
        data = open_images(self.recipe.data, self.classes)
        self.use(data, world)
        self.notes += [data.note] if data.note else []
        return {"data": data.description, "data_sha256": data.identity, "classes": data.train.classes}

    def use(self, data: ImageData, world: World) -> None:
        """Plan the batches of opened images."""
        self.data, self.world = data, world
        self.batches = self.plan_batches(world.size)
        self.units_per_step = self.recipe.train.batch

    def start_workers(self, reader: Any) -> None:
        self._loader = ImageLoader(
            reader,
            self.examples,
            micro_steps=self.batches.accumulation,
            last=(self.steps - 1, self.batches.accumulation - 1),
            workers=count_workers(self.recipe.data.workers, self.world.device),
            device=self.world.device,
        )

    def examples(self, step: int, micro_step: int) -> list[Example]:
        first = self.batches.first(micro_step, self.world.rank)
        return self._images.examples(step, first, self.batches.micro_batch)

    def build(self, device: torch.device, policy: ComputePolicy | None = None) -> None:
        train = self.recipe.train
        self.policy = policy or compute_policy(device, train.precision, train.compile)
        # Initialised on the CPU, so that a seed gives the same weights on every device.
        with device if device.type == "meta" else contextlib.nullcontext():
            model = self.new_model(self.recipe, self.recipe.seed)
        self.model = model.to(device).train()
        if self.policy.compiles:
            check_compiler(device.type)
            self.compile()

    @classmethod
    def new_model(cls, recipe: R, seed: int | None) -> nn.Module:
        """Return the model, initialised from the seed, or with arbitrary weights if it is None."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compile the model in place."""

    def describe_batch(self, step: int) -> str:
        return self._images.identity(step)

    def close(self) -> None:
        if hasattr(self, "_loader"):
            self._loader.close()

    @classmethod
    def load(
        cls, run: Run, checkpoint: Checkpoint | None, device: torch.device, *, float32: bool = False
    ) -> LoadedModel:
        recipe: Any = run.recipe
        if checkpoint is None:
            model = cls.new_model(recipe, recipe.seed)
        else:
            with torch.device("meta"):  # weights that are overwritten need no initialisation
                model = cls.new_model(recipe, None)
            # Buffers that are not in the state dict would stay unset; these models have none.
            model.to_empty(device="cpu")
            load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
        objective = cls(recipe)
        return LoadedModel.from_run(
            run,
            checkpoint,
            cls.evaluated(model),
            device,
            images=recipe.data,
            image_size=objective.image_size,
            classes=objective.classes,
        )

    @classmethod
    def evaluated(cls, model: Any) -> nn.Module:
        """Return the part of the model to evaluate."""
        return model

    @classmethod
    def fetch(cls, recipe: R, progress: Progress) -> dict[str, Any]:
        data = open_images(recipe.data, cls(recipe).classes)
        return {
            "source": recipe.data.train,
            "classes": len(data.train.classes),
            "train_images": len(data.train),
            "validation_images": len(data.validation),
            "identity": data.identity,
        }


class Classification(ImageObjective[ClassificationRecipe]):
    best_metric = "validation_top1"

    def __init__(self, recipe: ClassificationRecipe) -> None:
        super().__init__(recipe)
        self.image_size, self.classes = recipe.model.image, recipe.model.classes
        self._criterion: nn.Module = SoftTargetCrossEntropy()
        if recipe.train.loss == "binary_cross_entropy":  # nonzero fractions of a class become targets of 1
            # Smoothing has to be 0: it gives every class a fraction, and above the threshold of 0 all targets are 1.
            self._criterion = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0, sum_classes=False)

    @property
    def multiple(self) -> int:
        return 2 if self.recipe.data.mixing.is_on else 1  # images are mixed in pairs

    def prepare(self, world: World, run: Run, initial: Weights | None) -> dict[str, object]:
        facts = super().prepare(world, run, initial)
        epochs, per_epoch = self.recipe.schedule.warmup_epochs, self._images.steps_per_epoch
        # A run that was started with such a schedule may be resumed.
        if run.info.get("step", 0) == 0 and epochs and epochs * per_epoch >= self.steps:
            raise UsageError(
                f"schedule.warmup_epochs {epochs:g} is {epochs * per_epoch:,.0f} steps ({per_epoch:,} an epoch), which "
                f"do not fit into a run of {self.steps:,} steps; lower it, e.g. --set schedule.warmup_epochs=0"
            )
        return facts

    def use(self, data: ImageData, world: World) -> None:
        super().use(data, world)
        recipe, train, size = self.recipe, self.recipe.train, self.image_size
        augmentation = recipe.data.augmentation
        self._mixer = Mixer(
            recipe.data.mixing, classes=recipe.model.classes, image=size, batch=train.batch, seed=recipe.seed
        )
        self._images = ImageBatches(
            len(data.train),
            batch=train.batch,
            group=self._mixer.group,
            repeats=augmentation.repeats,
            seed=recipe.seed,
        )
        self.steps = train.steps or max(1, int((train.epochs or 0) * self._images.steps_per_epoch))
        self.start_workers(Reader(data.train, training_transform(recipe.data, size), size, recipe.seed))

    @classmethod
    def new_model(cls, recipe: ClassificationRecipe, seed: int | None) -> nn.Module:
        return build_vit(recipe.model, seed)

    def compile(self) -> None:
        self.model.compile(**compiling.OPTIONS)  # in place, so that no name gets the prefix `_orig_mod.`

    def parameter_groups(self) -> list[ParameterGroup]:
        return decay_groups(self.recipe.optimizer, dict(self.model.named_parameters()), without_decay(self.model))

    def batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """Return normalised and mixed images, and each class's fraction in them."""
        images_BCHW, labels_B = to_device(self._loader.batch(step, micro_step), self.world.device)
        images_BCHW = normalise(images_BCHW, self.recipe.data)
        return self._mixer(images_BCHW, labels_B, step, self.batches.first(micro_step, self.world.rank))

    def synthetic_batch(self, examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size, classes = self.image_size, self.recipe.model.classes
        images_BCHW = torch.zeros(examples, 3, size, size, device=device)
        return images_BCHW, torch.full((examples, classes), 1 / classes, device=device)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images_BCHW, targets_BK = batch
        with self.policy.autocast():
            logits_BK = self.model(images_BCHW)
        return self._criterion(logits_BK.float(), targets_BK)  # autocast gives bf16 logits; the loss is in float32

    def learning_rate_multiplier(self, step: int) -> float:
        recipe, per_epoch = self.recipe, self._images.steps_per_epoch
        return cosine_multiplier(recipe.schedule, recipe.optimizer.lr, step, self.steps, per_epoch)

    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        size = self.recipe.validation.batch or self.recipe.train.micro_batch
        with self.policy.autocast():
            accuracy = measure_accuracy(
                self.model,
                self.data.validation,
                self.recipe.data,
                self.recipe.model.image,
                self.world,
                size,
                workers=self._loader.workers,
                pads=self.policy.compiles,
                stop_if_asked=stop_if_asked,
            )
        return {
            "validation_loss": accuracy.loss,
            "validation_top1": accuracy.top(1),
            "validation_top5": accuracy.top(5),
        }

    def plan_facts(self) -> PlanFacts:
        section, train, data = self.recipe.model, self.recipe.train, self.recipe.data
        held_out = data.validation if isinstance(data.validation, float) else 0.0
        per_epoch = int((known_images(data.train) or 0) * (1 - held_out)) // train.batch
        steps = train.steps or (int((train.epochs or 0) * per_epoch) or None)
        images = None if steps is None else steps * train.batch
        tokens = (section.image // section.patch) ** 2 + 1
        return PlanFacts(
            steps=steps,
            data=data.train,
            example="images",
            unit="image",
            read_seconds=seconds_to_read([section.image]),
            epochs=None if train.steps else train.epochs,
            values={"images": images, "tokens_per_image": tokens},
        )
