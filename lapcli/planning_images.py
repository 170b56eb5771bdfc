"""The plan of a classification recipe: sizes, batches, mixing groups, rates, cost. Touches no data."""

import json
from dataclasses import asdict, dataclass

import torch

from lapcli.data.images import KNOWN_SIZES
from lapcli.models.vit import build_vit, forward_flops
from lapcli.objectives.batching import plan_batches
from lapcli.objectives.classification import parameter_groups, uses_bf16
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.training.distributed import pick_device


@dataclass(frozen=True)
class ImagePlan:
    parameters: int
    laplacian_heads: list[int]
    heads: int
    head_grid: str
    tokens_per_image: int
    steps: int | None  # none: so many epochs of data that was not looked at
    epochs: float | None
    batch: int
    micro_batch: int
    accumulation: int
    processes: int
    mixing_group: int | None
    learning_rates: dict[str, float]
    flops_per_image: int  # forward and backward
    flops: float | None
    precision: str
    memory: dict[str, int]  # bytes on each process, estimated, by part
    data: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        steps = "by epochs, known once the data is there" if self.steps is None else f"{self.steps:,}"
        memory = sum(self.memory.values())
        lines = [
            ("parameters", f"{self.parameters:,}"),
            ("heads", f"{sum(self.laplacian_heads)} of {self.heads * len(self.laplacian_heads)} Laplacian (L)"),
            ("", self.head_grid),
            ("tokens", f"{self.tokens_per_image} an image"),
            ("steps", steps + (f", {self.epochs:g} epochs" if self.epochs else "")),
            ("batch", f"{self.batch:,} images"),
            (
                "",
                f"{self.processes} process{'es' if self.processes > 1 else ''} x {self.micro_batch} images "
                f"x {self.accumulation} accumulated",
            ),
            ("mixing", "none" if self.mixing_group is None else f"groups of {self.mixing_group} images share a lambda"),
            ("learning rate", "\n".join(f"{lr:.6g} {name}" for name, lr in self.learning_rates.items())),
            (
                "FLOPs",
                f"{self.flops_per_image:,} an image" + ("" if self.flops is None else f", {self.flops:.3e} in all"),
            ),
            ("memory", f"{memory / 1e9:.2f} GB a process, estimated, in {self.precision}"),
            ("", ", ".join(f"{part} {size / 1e9:.2f} GB" for part, size in self.memory.items())),
            ("data", self.data),
        ]
        return "\n".join(
            f"{name if i == 0 else '':<15}{line}" for name, text in lines for i, line in enumerate(text.splitlines())
        )


def plan_images(recipe: ClassificationRecipe, processes: int = 1) -> ImagePlan:
    section, train, mixing = recipe.model, recipe.train, recipe.data.mixing
    with torch.device("meta"):
        model = build_vit(section)
    device = torch.device(pick_device("auto" if train.device == "cuda" else train.device))
    bf16 = uses_bf16(recipe, device)
    batches = plan_batches(train.batch, train.micro_batch, processes, multiple=2 if mixing.is_on else 1)
    plan = section.head_plan()
    per_epoch = KNOWN_SIZES.get(recipe.data.train, 0) // train.batch
    steps = train.steps or (int((train.epochs or 0) * per_epoch) or None)
    flops = 3 * forward_flops(section)
    weights = sum(p.numel() * 4 for p in model.parameters())
    tokens = (section.image // section.patch) ** 2 + 1
    # What a block keeps for its backward: about 18 numbers of the width for each token (MLP ratio 4), half in bf16.
    activations = batches.micro_batch * tokens * section.width * 18 * section.layers * (2 if bf16 else 4)
    return ImagePlan(
        parameters=sum(p.numel() for p in model.parameters()),
        laplacian_heads=list(plan.per_layer),
        heads=plan.heads,
        head_grid=plan.grid(),
        tokens_per_image=tokens,
        steps=steps,
        epochs=None if train.steps else train.epochs,
        batch=batches.batch,
        micro_batch=batches.micro_batch,
        accumulation=batches.accumulation,
        processes=processes,
        mixing_group=(mixing.group or train.batch) if mixing.is_on else None,
        learning_rates={group.name: group.lr for group in parameter_groups(recipe, model)},
        flops_per_image=flops,
        flops=None if steps is None else float(steps) * train.batch * flops,
        precision="bf16" if bf16 else "float32",
        memory={"weights": weights, "gradients": weights, "optimizer": 2 * weights, "activations": activations},
        data=recipe.data.train,
    )
