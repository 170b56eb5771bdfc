"""The plan of a self-supervised recipe: sizes, crops, groups, both counts of epochs, rates, cost. Touches no data."""

import json
from dataclasses import asdict, dataclass

import torch

from lapcli.data.crops import BLUR, GLOBALS
from lapcli.data.images import KNOWN_SIZES
from lapcli.models.self_supervised import StudentTeacher
from lapcli.objectives.batching import plan_batches
from lapcli.objectives.classification import uses_bf16
from lapcli.objectives.dino.groups import parameter_groups
from lapcli.objectives.dino.masks import mask_counts
from lapcli.objectives.self_supervised import accumulation_in_words, epochs_in_words, image_flops
from lapcli.recipe.self_supervised import SelfSupervisedRecipe
from lapcli.training.distributed import pick_device


@dataclass(frozen=True)
class SelfSupervisedPlan:
    backbone_parameters: int
    head_parameters: int  # of both heads of a network
    laplacian_heads: list[int]
    heads: int
    head_grid: str
    tokens_per_crop: dict[str, int]
    masked_patches: int  # of a group, exactly
    blur: tuple[float, float, float]
    steps: int
    epochs: float  # of the schedule
    passes: float | None  # over the images; none: their number is not known before they are there
    length: str
    batch: int
    group: int
    micro_batch: int
    accumulation: int
    processes: int
    notes: list[str]
    learning_rates: dict[str, float]
    flops_per_image: int  # forward and backward of the student, forward of the teacher
    flops: float
    precision: str
    memory: dict[str, int]  # bytes on each process, estimated, by part
    data: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        memory, heads = sum(self.memory.values()), self.heads * len(self.laplacian_heads)
        lines = [
            ("parameters", f"{self.backbone_parameters:,} backbone, {self.head_parameters:,} heads; a teacher as many"),
            ("heads", f"{sum(self.laplacian_heads)} of {heads} Laplacian (L)"),
            ("", self.head_grid),
            ("tokens", ", ".join(f"{count} a {kind} crop" for kind, count in self.tokens_per_crop.items())),
            ("masks", f"{self.masked_patches:,} patches of a group of {self.group} images"),
            ("blur", "first global {:g}, second global {:g}, local {:g}".format(*self.blur)),
            ("steps", self.length),
            ("batch", f"{self.batch:,} images in {self.batch // self.group} groups"),
            (
                "",
                f"{self.processes} process{'es' if self.processes > 1 else ''} x {self.micro_batch} images "
                f"x {self.accumulation} accumulated",
            ),
            *(("", note) for note in self.notes),
            ("learning rate", "\n".join(f"{lr:.6g} {name}" for name, lr in self.learning_rates.items())),
            ("FLOPs", f"{self.flops_per_image:,} an image, {self.flops:.3e} in all"),
            ("memory", f"{memory / 1e9:.2f} GB a process, estimated, in {self.precision}"),
            ("", ", ".join(f"{part} {size / 1e9:.2f} GB" for part, size in self.memory.items())),
            ("data", self.data),
        ]
        return "\n".join(
            f"{name if i == 0 else '':<15}{line}" for name, text in lines for i, line in enumerate(text.splitlines())
        )


def plan_self_supervised(recipe: SelfSupervisedRecipe, processes: int = 1) -> SelfSupervisedPlan:
    section, train, crops = recipe.model, recipe.train, recipe.data.crops
    with torch.device("meta"):
        model = StudentTeacher(section)
    device = torch.device(pick_device("auto" if train.device == "cuda" else train.device))
    bf16 = uses_bf16(recipe, device)
    batches = plan_batches(train.batch, train.micro_batch, processes, multiple=train.group)
    plan = section.head_plan()
    images = KNOWN_SIZES.get(recipe.data.train)
    tokens = {
        kind: (size // section.patch) ** 2 + 1
        for kind, size in (("global", crops.global_size), ("local", crops.local_size))
    }
    ratio = recipe.data.masks.ratio[0], recipe.data.masks.ratio[1]
    masked = sum(mask_counts(GLOBALS * train.group, tokens["global"] - 1, recipe.data.masks.probability, ratio))
    backbone = sum(p.numel() for p in model.student.backbone.parameters())
    student = sum(p.numel() for p in model.student.parameters())
    flops = image_flops(recipe)
    return SelfSupervisedPlan(
        backbone_parameters=backbone,
        head_parameters=student - backbone,
        laplacian_heads=list(plan.per_layer),
        heads=plan.heads,
        head_grid=plan.grid(),
        tokens_per_crop=tokens,
        masked_patches=masked,
        blur=BLUR[crops.blur],
        steps=recipe.steps,
        epochs=recipe.steps / recipe.schedule.epoch_steps,
        passes=recipe.steps * train.batch / images if images else None,
        length=epochs_in_words(recipe, images),
        batch=batches.batch,
        group=train.group,
        micro_batch=batches.micro_batch,
        accumulation=batches.accumulation,
        processes=processes,
        notes=accumulation_in_words(batches.accumulation),
        learning_rates={g.name: g.lr for g in parameter_groups(recipe, model) if not g.name.endswith("no decay")},
        flops_per_image=flops,
        flops=float(recipe.steps) * train.batch * flops,
        precision="bf16" if bf16 else "float32",
        memory=_memory(recipe, student, batches.micro_batch, tokens, masked, bf16),
        data=recipe.data.train,
    )


def _memory(
    recipe: SelfSupervisedRecipe, student: int, images: int, tokens: dict[str, int], masked: int, bf16: bool
) -> dict[str, int]:
    """Bytes by part. A block keeps about 18 numbers of the width for each token (MLP ratio 4), half in bf16; the loss
    holds the targets of one head at a time, in float32, and the gradient of its prototypes."""
    section, crops = recipe.model, recipe.data.crops
    seen = images * (GLOBALS * tokens["global"] + crops.locals * tokens["local"])
    head = section.head
    targets = max(
        masked * (images // recipe.train.group) * head.ibot_prototypes, GLOBALS * images * head.dino_prototypes
    )
    prototypes = head.bottleneck * max(head.ibot_prototypes, head.dino_prototypes)
    return {
        "weights": 2 * 4 * student,
        "gradients": 4 * student,
        "optimizer": 8 * student,
        "activations": seen * section.width * 18 * section.layers * (2 if bf16 else 4),
        "loss": 4 * (targets + prototypes),
    }
