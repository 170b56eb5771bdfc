"""The schema of image classification recipes: the ViT, its images, augmentation, mixing, optimizer, schedule.

The values of the paper's table `tab:training_recipe` are in `recipes/vitb_*.yaml`; the defaults here are DeiT-III's.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lapcli.recipe.optimizers import AdamWSection
from lapcli.recipe.schema import (
    CLASSES,
    FEATURES,
    BaseRecipe,
    Source,
    TrainSection,
    TransformerModel,
    ValidationSection,
)
from lapcli.recipe.section import (
    Count,
    Fraction,
    HeldOut,
    Modality,
    NonNegative,
    Positive,
    Section,
    Size,
    Text,
    Whole,
    combination,
)

Channels = Annotated[list[NonNegative], Field(min_length=3, max_length=3)]
Policy = Annotated[str, Field(pattern=r"^(3a|originalr?|v0r?|(augmix|rand)(-[a-z]+[\d.-]*)*)$")]


class ViTModel(TransformerModel):
    """timm's DeiT-III ViT with the DeiT repository's values: `lapcli/models/vit.py`."""

    layers: Annotated[Whole, Field(ge=1, le=1000)] = 12
    width: Size = 768
    heads: Annotated[Whole, Field(ge=1, le=1024)] = 12
    mlp_ratio: Positive = 4.0  # hidden size of the MLP, in widths
    image: Size = 224  # pixels of a side
    patch: Size = 16  # pixels of a side
    classes: Annotated[Whole, Field(ge=2, le=10**6)] = 1000  # of the labels
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0  # probability that a block is skipped in training
    layer_scale: Positive | None = 1e-4  # null: no LayerScale; timm's own: 1e-6

    @combination("image", "patch")
    def _patches_tile_the_image(self) -> str | None:
        return f"{self.image} is not a multiple of patch {self.patch}" if self.image % self.patch else None


class Augmentation(Section):
    """The augmentation of a training image before mixing, all by timm."""

    # Padded: at the image's own size, after padding by 4 pixels.
    crop: Literal["random_resized", "padded", "none"] = "random_resized"
    flip: Fraction = 0.5  # probability of a horizontal flip
    # timm's name; null: none.
    policy: Policy | None = Field(default=None, description="3a or a policy such as rand-m9-mstd0.5-inc1")
    color_jitter: Positive | None = None  # strength; null: none
    repeats: Annotated[Whole, Field(ge=1, le=100)] = 1  # copies of an image in an epoch, each augmented differently

    def ignored(self) -> dict[str, str]:
        is_off = self.color_jitter is not None and self.policy not in (None, "3a")
        return {"color_jitter": f"the policy {self.policy} switches it off"} if is_off else {}


class Mixing(Section):
    """Mixup and CutMix; one lambda and box for each group of the global batch."""

    mixup: NonNegative = 0.0  # alpha; 0: none
    cutmix: NonNegative = 0.0  # alpha; 0: none
    probability: Fraction = 1.0  # that a group is mixed
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the targets
    group: Count | None = None  # images that share a lambda; null: the whole batch

    @property
    def is_on(self) -> bool:
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    @combination("group")
    def _group_has_pairs(self) -> str | None:
        if self.group is not None and self.group % 2:
            return "partners come in pairs: give an even number"
        return None


class ImageFiles(Source):
    """Images and labels: `builtin` (scikit-learn's digits), `builtin:photographs` (pieces of its two photographs),
    `hub:OWNER/NAME`, `plugin:NAME`, a folder of parquet files or images."""

    modality: ClassVar[Modality] = "images"

    # A folder; a fraction of the training images; null: the source's own validation or test images.
    validation: Text | HeldOut | None = Field(default=None, description="a folder or a number (above 0 and below 1)")
    label_column: Text | None = None  # of parquet files and hub sets; null: the only one that holds classes
    # Processes that read ahead.
    workers: Literal["auto"] | Annotated[Whole, Field(ge=0, le=256)] = Field(
        default="auto", description="`auto` or a whole number (at least 0 and at most 256)"
    )
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"  # when an image is resized
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the shorter side, when evaluating
    mean: Channels = Field(default_factory=lambda: [0.485, 0.456, 0.406])  # per channel, subtracted
    # Per channel, the divisor.
    std: Annotated[list[Positive], Field(min_length=3, max_length=3)] = Field(
        default_factory=lambda: [0.229, 0.224, 0.225]
    )

    @combination("validation", "train")
    def _builtin_has_one_part(self) -> str | None:
        if self.train == "builtin" and not isinstance(self.validation, float):
            return "the digits come in one part; give a fraction, such as 0.2"
        return None


class ImageSource(ImageFiles):
    augmentation: Augmentation = Augmentation()
    mixing: Mixing = Mixing()


class ClassificationTrain(TrainSection):
    # Binary: one loss per class, as in DeiT-III on ImageNet.
    loss: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"


class CosineSchedule(Section):
    """Linear from `start_lr` over the warm-up epochs, then along one half-cosine to `final_lr`."""

    warmup_epochs: NonNegative = 0.0  # from start_lr to optimizer.lr
    start_lr: NonNegative = 0.0  # at the first step
    final_lr: NonNegative = 0.0  # at the end


class ImageValidation(ValidationSection):
    batch: Count | None = None  # images per process and forward; null: train.micro_batch


class ClassificationRecipe(BaseRecipe):
    """Image classification with a ViT."""

    implementation = "lapcli.objectives.classification:Classification"
    gives = frozenset({CLASSES, FEATURES})
    metrics: ClassVar = {
        "validation_loss": ("nats", "lower"),
        "validation_top1": ("fraction", "higher"),
        "validation_top5": ("fraction", "higher"),
    }
    takes_any_optimizer = True

    objective: Literal["classification"]
    model: ViTModel
    data: ImageSource
    train: ClassificationTrain
    optimizer: AdamWSection
    schedule: CosineSchedule = CosineSchedule()
    validation: ImageValidation = ImageValidation()

    @combination("train", "data")
    def _groups_fit_the_batch(self) -> str | None:
        mixing, batch = self.data.mixing, self.train.batch
        if not mixing.is_on:
            return None
        group, micro_batch = mixing.group or batch, self.train.micro_batch
        if batch % group == 0 and group % 2 == 0 and micro_batch >= 2:
            return None
        needed = f"a batch that is a multiple of data.mixing.group {group}" if mixing.group else "an even batch"
        return f"mixup and CutMix need pairs: {needed} and a micro_batch of at least 2, got {batch} and {micro_batch}"

    @combination("data", "train")
    def _smoothing_keeps_two_classes(self) -> str | None:
        if self.train.loss == "binary_cross_entropy" and self.data.mixing.label_smoothing > 0:
            return "mixing.label_smoothing makes every class a target of the binary cross entropy; set it to 0"
        return None

    def schedule_problems(self) -> list[tuple[str, str]]:
        """Return a warm-up longer than the run. With `train.steps` the epochs of a run depend on the data,
        so they are only checked when it starts."""
        warmup, epochs = self.schedule.warmup_epochs, self.train.epochs
        if self.train.steps is None and epochs is not None and 0 < epochs <= warmup:
            return [("schedule.warmup_epochs", f"{warmup:g} do not fit into a run of {epochs:g} epochs; lower it")]
        return []

    def paper_recipe(self) -> str:
        return {10: "vitb_cifar10", 100: "vitb_cifar100"}.get(self.model.classes, "vitb_imagenet")
