"""Image classification with a ViT: mixed images, soft targets, cross entropy or binary cross entropy, top-1 and top-5.

Shapes: B images, K classes.
"""

from collections.abc import Callable

import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from lapcli.data.images.augmentation import Mixer, normalise, training_transform
from lapcli.data.images.loader import ImageBatches, Reader, seconds_to_read
from lapcli.data.images.sources import ImageData
from lapcli.data.sources import known_images
from lapcli.measures.accuracy import measure_accuracy
from lapcli.models import compiling
from lapcli.models.vit import build_vit, forward_flops, without_decay
from lapcli.objectives.image_objective import ImageObjective
from lapcli.objectives.objective import ParameterGroup, PlanFacts, decay_groups
from lapcli.objectives.schedules import cosine_multiplier
from lapcli.objectives.weights import InitialWeights
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.runs import Run
from lapcli.runtime.devices import to_device
from lapcli.runtime.errors import UsageError
from lapcli.runtime.ranks import World


def build_loss(recipe: ClassificationRecipe) -> nn.Module:
    """Return the loss as a function of logits and class fractions. Binary: nonzero fractions become targets of 1."""
    if recipe.train.loss == "binary_cross_entropy":
        # Smoothing has to be 0: it gives every class a share, and beyond the threshold of 0 all targets would be 1.
        return BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0, sum_classes=False)
    return SoftTargetCrossEntropy()


class Classification(ImageObjective[ClassificationRecipe]):
    best_metric = "validation_top1"

    def __init__(self, recipe: ClassificationRecipe) -> None:
        super().__init__(recipe)
        self.image_size, self.classes = recipe.model.image, recipe.model.classes
        self._criterion = build_loss(recipe)

    @property
    def multiple(self) -> int:
        return 2 if self.recipe.data.mixing.is_on else 1  # images are mixed in pairs

    def prepare(self, world: World, run: Run, initial: InitialWeights | None) -> dict[str, object]:
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

    @property
    def flops_per_step(self) -> float:
        return 3.0 * forward_flops(self.recipe.model) * self.recipe.train.batch  # a backward costs two forwards

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
            **self.image_facts(),
            read_seconds=seconds_to_read([section.image]),
            epochs=None if train.steps else train.epochs,
            values={"images": images, "tokens_per_image": tokens},
        )
