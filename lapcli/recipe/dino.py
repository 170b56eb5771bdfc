"""The schema of self-supervised recipes: the ViT and its heads, crops, masks, losses, rates.

The values of the paper's table `tab:dino_hparams` are in `recipes/dino_vits.yaml`; the defaults here are the same, and
DINOv3's if the paper gives no value.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lapcli.recipe.optimizers import DinoOptimizer
from lapcli.recipe.schema import FEATURES, BaseRecipe, TrainSection, TransformerModel, ValidationSection
from lapcli.recipe.section import (
    Count,
    Fraction,
    FractionRange,
    NonNegative,
    Positive,
    Section,
    Size,
    Whole,
    combination,
)
from lapcli.recipe.vision import ImageFiles

Ends = Annotated[list[Fraction], Field(min_length=2, max_length=2)]


class HeadSection(Section):
    """Each of the two heads: an MLP width-hidden-hidden-bottleneck, L2 normalisation, prototypes without a bias."""

    hidden: Size = 2048  # size of the hidden layers
    bottleneck: Size = 256  # size before the prototypes
    dino_prototypes: Annotated[Whole, Field(ge=2, le=2**20)] = 65_536  # of the class token
    ibot_prototypes: Annotated[Whole, Field(ge=2, le=2**20)] = 65_536  # of the patches


class DinoModel(TransformerModel):
    """The self-supervised ViT: `lapcli/models/dino_vit.py`."""

    layers: Annotated[Whole, Field(ge=1, le=1000)] = 12
    width: Size = 384
    heads: Annotated[Whole, Field(ge=1, le=1024)] = 6
    mlp_ratio: Positive = 4.0  # hidden size of the MLP, in widths
    patch: Size = 16  # pixels of a side
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the student
    layer_scale: Positive = 1e-5  # initial factor of each branch
    rope_base: Annotated[float, Field(gt=1, le=1e9)] = 100.0  # of the rotary positions
    rope_precision: Literal["float32", "bf16"] = "float32"  # bf16: as DINOv3 trains
    head: HeadSection = HeadSection()

    @combination("width", "heads")
    def _heads_can_be_rotated(self) -> str | None:
        if self.width % self.heads == 0 and (self.width // self.heads) % 4:
            return f"the head size {self.width // self.heads} (width / heads) must be a multiple of 4 for rotary"
        return None


class Crops(Section):
    """Two global crops for teacher and student, and local crops for the student only."""

    global_size: Size = 224  # pixels of a side
    global_scale: FractionRange = Field(default_factory=lambda: [0.32, 1.0])  # of the image's area
    locals: Annotated[Whole, Field(ge=0, le=100)] = 8  # local crops of an image
    local_size: Size = 96  # pixels of a side
    local_scale: FractionRange = Field(default_factory=lambda: [0.05, 0.32])  # of the image's area
    # How often the first global, the second global and a local crop are blurred. `executed`: 0, 0.9 and 0.5, as in
    # DINOv3's code; `documented`: 1, 0.1 and 0.5, as in its settings.
    blur: Literal["executed", "documented"] = "executed"


class Masks(Section):
    """Patches of global crops that are hidden from the student."""

    probability: Annotated[float, Field(gt=0, le=1)] = 0.5  # of a global crop
    ratio: FractionRange = Field(default_factory=lambda: [0.1, 0.5])  # of its patches


class CropSource(ImageFiles):
    crops: Crops = Crops()
    masks: Masks = Masks()


class SelfSupervisedTrain(TrainSection):
    # Images whose masks are sampled together and among which KoLeo searches neighbours: the paper's batch on one GPU.
    group: Annotated[Whole, Field(ge=1, le=10**6)] = 224
    dino: NonNegative = 1.0  # weight of the DINO loss
    koleo: NonNegative = 0.1  # weight of the KoLeo loss
    ibot: NonNegative = 1.0  # weight of the iBOT loss
    # Dtype of the residual stream if train.precision is bf16. bf16: as in DINOv3, without a float32 stream.
    stream: Literal["bf16", "float32"] = "bf16"
    student_temperature: Positive = 0.1  # of the student's softmax
    sinkhorn_iterations: Annotated[Whole, Field(ge=1, le=1000)] = 3  # of the teacher's targets

    @combination("group", "batch", "micro_batch")
    def _groups_fit(self) -> str | None:
        if self.batch % self.group == 0 and self.micro_batch >= self.group:
            return None
        return (
            f"masks and neighbours belong to groups of {self.group} images, which batch {self.batch} and micro_batch "
            f"{self.micro_batch} would cut; give a batch that is a multiple of it, and at least as large a micro_batch"
        )

    @combination("koleo", "group")
    def _neighbours(self) -> str | None:
        return "needs neighbours: a group of at least 2" if self.koleo > 0 and self.group < 2 else None

    @combination("dino", "ibot")
    def _something_to_learn(self) -> str | None:
        return "is 0, and so is ibot: nothing would be learned" if self.dino == self.ibot == 0 else None


class SelfSupervisedSchedule(Section):
    """All schedules count steps; an epoch is a number of steps, for any number of images."""

    epoch_steps: Count = 1250  # steps that count as an epoch
    warmup_epochs: NonNegative = 10.0  # of the learning rate, from 0
    final_lr: NonNegative = 1e-6  # at the end of a half-cosine
    final_weight_decay: NonNegative | None = 0.1  # null: as at the start
    teacher_momentum: Ends = Field(default_factory=lambda: [0.992, 1.0])  # start, end
    # Start, end; constant after the warm-up.
    teacher_temperature: Annotated[list[Positive], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.04, 0.07]
    )
    teacher_warmup_epochs: NonNegative = 30.0  # of the temperature
    frozen_epochs: NonNegative = 1.0  # in which the prototypes are not trained


class NeighbourValidation(ValidationSection):
    """k-nearest-neighbour accuracy of the teacher's class token on held-out images."""

    neighbours: Annotated[Whole, Field(ge=1, le=10**6)] = 20  # that vote
    images: Count = 2_000  # at most, of the held-out ones
    batch: Count | None = None  # images per process and forward; null: train.micro_batch


class SelfSupervisedRecipe(BaseRecipe):
    """DINO, iBOT and KoLeo with a student and a teacher."""

    implementation = "lapcli.objectives.self_supervised:SelfSupervised"
    gives = frozenset({FEATURES})
    metrics: ClassVar = {"validation_knn": ("fraction", "higher")}

    objective: Literal["self_supervised"]
    model: DinoModel = DinoModel()
    data: CropSource
    train: SelfSupervisedTrain
    optimizer: DinoOptimizer
    schedule: SelfSupervisedSchedule = SelfSupervisedSchedule()
    validation: NeighbourValidation = NeighbourValidation()

    @property
    def micro_batch_counts(self) -> bool:
        return True  # Sinkhorn-Knopp balances each one separately

    @combination("data", "model")
    def _patches_tile_the_crops(self) -> str | None:
        crops, patch = self.data.crops, self.model.patch
        for name, size in (("global_size", crops.global_size), ("local_size", crops.local_size)):
            if size % patch:
                return f"crops.{name} {size} is not a multiple of model.patch {patch}"
        return None

    @combination("data", "model", "train")
    def _something_is_masked(self) -> str | None:
        masks, patches = self.data.masks, (self.data.crops.global_size // self.model.patch) ** 2
        if self.train.ibot > 0 and (int(masks.probability * 2 * self.train.group) < 1 or masks.ratio[1] * patches < 1):
            return "masks would hide no patch; raise masks.probability or masks.ratio, or set train.ibot to 0"
        return None

    @property
    def steps(self) -> int:
        """Steps of the run: `train.steps`, or `train.epochs` times `schedule.epoch_steps`."""
        return self.train.steps or max(1, int((self.train.epochs or 0) * self.schedule.epoch_steps))

    def schedule_problems(self) -> list[tuple[str, str]]:
        problems = []
        for key, what in (
            ("warmup_epochs", "the learning rate would never reach its peak"),
            ("teacher_warmup_epochs", "the teacher's temperature would never reach its end"),
            ("frozen_epochs", "the prototypes would never be trained"),
        ):
            epochs, epoch_steps = getattr(self.schedule, key), self.schedule.epoch_steps
            steps = epochs * epoch_steps
            # The temperature may rise until the last step; after the other two, some steps must remain.
            if steps > self.steps or (steps == self.steps and key != "teacher_warmup_epochs"):
                fit = f"{epochs:g} epochs of {epoch_steps:,} steps do not fit into a run of {self.steps:,} steps"
                problems.append((f"schedule.{key}", f"{fit}: {what}; lower it, or schedule.epoch_steps"))
        return problems

    def paper_recipe(self) -> str:
        return "dino_vits"
