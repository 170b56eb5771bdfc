"""The interface of an objective, which covers everything specific to one training method.

One class contains everything about an objective: data, model, batches, loss, validation and loading. The
loop owns the common parts: accumulation, clipping, schedules, checkpoints, signals, metrics and
progress. The type of its recipes (`lapcli/recipe`) names the class, and says without importing torch what its models
can do and which metrics its validation has.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from lapcli.checkpoint import Checkpoint
from lapcli.models.gpt import GPT
from lapcli.recipe.optimizers import OptimizerSection
from lapcli.recipe.schema import BaseRecipe
from lapcli.recipe.vision import ImageFiles
from lapcli.runs import Run
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World

if TYPE_CHECKING:
    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.objectives.weights import Weights

R = TypeVar("R", bound=BaseRecipe)


@dataclass
class ParameterGroup:
    """Parameters that share an optimizer and a peak learning rate."""

    name: str
    optimizer: str  # its name, as in `optimizer.name` of a recipe
    lr: float
    parameters: Mapping[str, Tensor]  # by their names in the model's state dict
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer: betas, eps, weight_decay, steps, dtype
    # Options that change with the step; an `lr` among them overrides the schedule.
    at_step: Callable[[int], dict[str, float]] | None = None
    clipped_with: str = "all"  # groups with the same name here share a gradient norm


def decay_groups(
    settings: OptimizerSection, parameters: Mapping[str, Tensor], without_decay: Collection[str]
) -> list[ParameterGroup]:
    """Group parameters with and without weight decay, at one learning rate, for any optimizer that a recipe names."""
    decayed = {name: p for name, p in parameters.items() if name not in without_decay}
    others = {name: p for name, p in parameters.items() if name in without_decay}
    parts = (("weights", decayed, settings.weight_decay), ("without decay", others, 0.0))
    return [
        ParameterGroup(name, settings.name, settings.lr, part, {**settings.options(), "weight_decay": decay})
        for name, part, decay in parts
        if part
    ]


@dataclass(frozen=True)
class BatchPlan:
    """The split of a step's global batch: `accumulation` forwards of `micro_batch` examples per process."""

    batch: int
    micro_batch: int
    accumulation: int
    processes: int

    def first(self, micro_step: int, rank: int) -> int:
        """Return the position in the global batch of the first example of a micro-batch."""
        return (micro_step * self.processes + rank) * self.micro_batch


def plan_batches(batch: int, micro_batch: int, processes: int, multiple: int = 1) -> BatchPlan:
    """Choose the largest micro-batch up to the recipe's that divides a process's part; the rest is accumulation.

    `multiple`: a micro-batch is a multiple of it, if examples come in pairs or groups. Micro-batches are equal, so that
    the mean of their means is the mean over the batch. A part without a divisor near the recipe's micro-batch
    is refused: 254 examples with a micro-batch of 64 would take 127 forwards of 2 instead of 4.
    """
    if batch % (processes * multiple):
        raise UsageError(
            f"a global batch of {batch} cannot be shared evenly by {processes} processes; change train.batch to a "
            f"multiple of {processes * multiple}, or the number of processes"
        )
    share = batch // processes
    sizes = [size for size in range(multiple, share + 1, multiple) if share % size == 0]
    micro = max((size for size in sizes if size <= micro_batch), default=sizes[0])
    if micro > micro_batch or share // micro >= 2 * -(-share // micro_batch):
        larger = next(size for size in sizes if size > micro_batch)
        raise UsageError(
            f"{share} examples a process cannot be split into equal micro-batches near {micro_batch}; change "
            f"train.batch, or use --set train.micro_batch={larger} (or {micro})"
        )
    return BatchPlan(batch, micro, share // micro, processes)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights and its input preprocessing."""

    name: str
    module: nn.Module
    gives: frozenset[str]
    weights_sha256: str | None
    step: int | None
    device: torch.device
    run: Run | None = None
    tokenizer: "Tokenizer | None" = None  # of language models
    images: ImageFiles | None = None  # their normalisation, and the source that it was trained on
    image_size: int | None = None  # pixels of a side
    classes: int | None = None  # of a classifier trained here

    @classmethod
    def from_run(
        cls, run: Run, checkpoint: Checkpoint | None, module: nn.Module, device: torch.device, **known: Any
    ) -> "LoadedModel":
        """Wrap a run's model. `module` has the checkpoint's weights or random ones; `known` sets further fields."""
        return cls(
            name=run.name,
            module=module.to(device),
            gives=run.recipe.gives,
            weights_sha256=None if checkpoint is None else checkpoint.weights_sha256,
            step=0 if checkpoint is None else checkpoint.step,
            device=device,
            run=run,
            **known,
        )

    @property
    def validation_batch(self) -> int | None:
        """Batch size of validations in its run, if the recipe has one."""
        return None if self.run is None else getattr(self.run.recipe.validation, "batch", None)

    def language_model(self) -> "tuple[GPT, Tokenizer]":
        """Return the GPT and its tokenizer; UsageError for other models."""
        if not isinstance(self.module, GPT) or self.tokenizer is None:
            raise UsageError(f"{self.name} is not a GPT; name a run of one with --run")
        return self.module, self.tokenizer


@dataclass(frozen=True)
class PlanFacts:
    """Facts about a recipe that a plan cannot compute from the training step."""

    steps: int | None  # None: the recipe has epochs, and the size of its data is not known
    data: str
    example: str = "examples"  # what batches are counted in
    unit: str = "example"  # what FLOPs are given for
    units_per_example: int = 1
    epochs: float | None = None
    read_seconds: float = 0.0  # of one core, to read an example; 0: negligible
    values: Mapping[str, Any] = field(default_factory=dict)  # more keys of the JSON


class Objective(ABC, Generic[R]):
    """One training method for the models of a recipe.

    Training calls `prepare`, then `build`, then `batch` and `loss` for each micro-step. A plan needs no data: it calls
    `build` on the meta device, then `loss` on a `synthetic_batch`. Evaluation and analysis call `load`.
    """

    unit = "examples"  # of throughput: tokens, images, ...
    best_metric: str | None = None  # of `validate`, whose maximum marks the best checkpoint; None: keep the newest

    # Set by `prepare`
    world: World
    batches: BatchPlan
    steps: int
    units_per_step: int
    notes: list[str]  # lines for the log before the first step
    # Set by `build`
    model: Any
    policy: ComputePolicy

    def __init__(self, recipe: R) -> None:
        self.recipe = recipe
        self.notes = []

    @property
    def multiple(self) -> int:
        """The size that must divide every micro-batch, where examples come in pairs or groups."""
        return 1

    def plan_batches(self, processes: int) -> BatchPlan:
        train = self.recipe.train
        return plan_batches(train.batch, train.micro_batch, processes, self.multiple)

    @abstractmethod
    def prepare(self, world: World, run: Run, initial: "Weights | None") -> dict[str, Any]:
        """Read the data and plan the batches, on every rank; return facts for `run.json`, `data_sha256` among them.

        `initial` are the weights to start from, if the recipe names any and the run has no checkpoint.
        """

    @abstractmethod
    def build(self, device: torch.device, policy: ComputePolicy | None = None) -> None:
        """Build the model from the recipe's seed; on the meta device no weight may take memory.

        `policy`: of a device to plan for; by default that of `device`.
        """

    def blocks(self) -> list[nn.Module]:
        """Return the transformer blocks, which are sharded and recomputed one by one."""
        lists = [module for name, module in self.model.named_modules() if name.rpartition(".")[2] == "blocks"]
        return [block for each in lists for block in each.children()]

    def recompute_blocks(self) -> None:
        """Keep only the inputs of blocks for the backward pass, which recomputes their other activations."""
        for block in self.blocks():
            block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)

    def shards(self) -> list[nn.Module]:
        """Return the modules whose weights several processes gather one by one; all others are gathered together."""
        return self.blocks()

    def gathered_dtype(self, shard: nn.Module) -> torch.dtype | None:
        """Return the dtype in which sharded weights are gathered, if it differs from the dtype they are stored in."""
        return None

    @abstractmethod
    def parameter_groups(self) -> list[ParameterGroup]: ...

    @abstractmethod
    def batch(self, step: int, micro_step: int) -> Any:
        """Return a batch, a pure function of recipe, seed, step and micro-step: there is no iterator state."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor: ...

    @abstractmethod
    def learning_rate_multiplier(self, step: int) -> float: ...

    @abstractmethod
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Return metrics, equal on all ranks; call `stop_if_asked`, which raises to stop, equally often on each."""

    @abstractmethod
    def describe_batch(self, step: int) -> str:
        """Describe the examples of a step, for the message about a non-finite loss."""

    @classmethod
    @abstractmethod
    def load(
        cls, run: Run, checkpoint: Checkpoint | None, device: torch.device, *, float32: bool = False
    ) -> LoadedModel:
        """Load a run's model with the weights of a checkpoint; without one, untrained, from the recipe's seed.

        `float32`: compute in float32, to keep bf16 rounding out of
        measurements.
        """

    @classmethod
    @abstractmethod
    def fetch(cls, recipe: Any, progress: Progress) -> "dict[str, Any] | list[dict[str, Any]]":
        """Download and prepare everything that a run of the recipe reads; return what `lap fetch` prints."""

    def synthetic_batch(self, examples: int, device: torch.device) -> Any:
        """Return a batch of that many examples with arbitrary values, for plans."""
        raise UsageError(f"recipes of {self.recipe.objective} cannot be planned: {type(self).__name__} has no batches")

    def plan_facts(self) -> PlanFacts:
        train = self.recipe.train
        return PlanFacts(steps=train.steps, data=f"not described by {type(self).__name__}", epochs=train.epochs)

    def update_metrics(self) -> dict[str, Tensor]:
        """Return further metrics of an update, still on the device, before the optimizer step on every rank.

        The loop copies their means over the ranks to the host together with the loss, in the step's one sync.
        """
        return {}

    def after_step(self, step: int) -> None:
        """Update state that follows the weights, such as a teacher."""

    def weights_metadata(self) -> dict[str, str]:
        return {"laplacian_heads": str(self.recipe.model.head_plan())}  # type: ignore[attr-defined]

    def finish(self) -> dict[str, Any]:
        """Return results besides the weights, such as samples; called after the last step on rank 0."""
        return {}

    def close(self) -> None:
        """Release data workers and open files on every rank when the run ends, however it ends."""
