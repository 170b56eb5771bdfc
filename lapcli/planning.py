"""What a recipe would train, before anything starts: sizes, batches, rates, cost. Touches no data."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from lapcli.data.tokens import describe_source
from lapcli.errors import UsageError
from lapcli.models.gpt import GPT
from lapcli.objectives.batching import plan_batches
from lapcli.objectives.language_model import gpt_config, parameter_groups
from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.schema import AnyRecipe, LanguageModelRecipe
from lapcli.recipe.self_supervised import SelfSupervisedRecipe
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.training.distributed import pick_device

if TYPE_CHECKING:
    from lapcli.planning_images import ImagePlan
    from lapcli.planning_self_supervised import SelfSupervisedPlan


@dataclass(frozen=True)
class Plan:
    parameters: int
    laplacian_heads: list[int]
    heads: int
    head_grid: str
    steps: int | None  # none: so many epochs of data that was not looked at
    tokens_per_step: int
    tokens: int | None
    batch: int
    micro_batch: int
    accumulation: int
    processes: int
    learning_rates: dict[str, float]
    flops_per_token: int
    flops: float | None
    precision: str
    memory: dict[str, int]  # bytes on each process, estimated, by part
    data: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        total = sum(self.memory.values())
        steps = "by epochs, known once the data is there" if self.steps is None else f"{self.steps:,}"
        lines = [
            ("parameters", f"{self.parameters:,}"),
            ("heads", f"{sum(self.laplacian_heads)} of {self.heads * len(self.laplacian_heads)} Laplacian (L)"),
            ("", self.head_grid),
            ("steps", steps),
            ("batch", f"{self.batch:,} sequences, {self.tokens_per_step:,} tokens a step"),
            (
                "",
                f"{self.processes} process{'es' if self.processes > 1 else ''} x {self.micro_batch} sequences "
                f"x {self.accumulation} accumulated",
            ),
            ("tokens", "-" if self.tokens is None else f"{self.tokens:,}"),
            ("learning rate", "\n".join(f"{lr:.6g} {name}" for name, lr in self.learning_rates.items())),
            (
                "FLOPs",
                f"{self.flops_per_token:,} a token" + ("" if self.flops is None else f", {self.flops:.3e} in all"),
            ),
            ("memory", f"{_gigabytes(total)} a process, estimated, in {self.precision}"),
            ("", ", ".join(f"{part} {_gigabytes(size)}" for part, size in self.memory.items())),
            ("data", self.data),
        ]
        return "\n".join(
            f"{name if i == 0 else '':<15}{line}" for name, text in lines for i, line in enumerate(text.splitlines())
        )


def plan_training(recipe: AnyRecipe, processes: int = 1) -> "Plan | ImagePlan | SelfSupervisedPlan":
    """The plan of any recipe on that many processes."""
    if isinstance(recipe, ClassificationRecipe):
        from lapcli.planning_images import plan_images

        return plan_images(recipe, processes)
    if isinstance(recipe, SelfSupervisedRecipe):
        from lapcli.planning_self_supervised import plan_self_supervised

        return plan_self_supervised(recipe, processes)
    if not isinstance(recipe, LanguageModelRecipe):
        raise UsageError(f"objective {recipe.objective} cannot be planned yet")
    config = gpt_config(recipe)
    with torch.device("meta"):
        model = GPT(config)
    device = pick_device("auto" if recipe.train.device == "cuda" else recipe.train.device)
    bf16 = recipe.train.precision == "bf16" or (recipe.train.precision == "auto" and device == "cuda")
    if bf16:
        model.use_bf16()
    batches = plan_batches(recipe.train.batch, recipe.train.micro_batch, processes)
    groups = parameter_groups(recipe, model)
    tokens_per_step = recipe.train.batch * config.context
    steps = recipe.train.steps
    tokens = None if steps is None else steps * tokens_per_step
    return Plan(
        parameters=sum(p.numel() for p in model.parameters()),
        laplacian_heads=list(config.head_plan.per_layer),
        heads=config.heads,
        head_grid=config.head_plan.grid(),
        steps=steps,
        tokens_per_step=tokens_per_step,
        tokens=tokens,
        batch=batches.batch,
        micro_batch=batches.micro_batch,
        accumulation=batches.accumulation,
        processes=processes,
        learning_rates={group.name: group.lr for group in groups},
        flops_per_token=model.flops_per_token(),
        flops=None if tokens is None else float(tokens) * model.flops_per_token(),
        precision="bf16" if bf16 else "float32",
        memory=_memory(model, groups, batches.micro_batch, bf16),
        data=describe_source(recipe.data, recipe.tokenizer),
    )


def _memory(model: GPT, groups: list[ParameterGroup], micro_batch: int, bf16: bool) -> dict[str, int]:
    """Bytes by part. A block keeps 10 numbers of the width for each token in float32; in bf16 18, and a copy of its
    weights (measured with the allocator's events)."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = {"muon": 1, "adamw": 2}
    optimizer = sum(
        moments[group.kind] * p.numel() * p.element_size() for group in groups for p in group.parameters.values()
    )
    tokens = micro_batch * config.context
    kept, size = (18, 2) if bf16 else (10, 4)
    activations = tokens * config.width * (kept * config.layers + 4) * size
    if bf16:
        activations += 2 * sum(p.numel() for name, p in model.named_parameters() if name.startswith("blocks."))
    # A chunk of float32 logits, and the head's gradient while the chunks add to it.
    chunk_rows = min(tokens, max(256, 2**22 // config.vocab))
    loss = chunk_rows * config.vocab * 4 + config.vocab * config.width * 4
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": optimizer,
        "activations": activations,
        "loss": loss,
    }


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
