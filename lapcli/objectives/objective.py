"""The interface between an objective and the training loop. Everything else is the loop's and the same for all
objectives: accumulation, clipping, schedules, checkpoints, signals, metrics and progress."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from lapcli.recipe.optimizers import OptimizerSection
from lapcli.runtime.errors import UsageError


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
    """The split of a step's global batch: `accumulation` forwards of `micro_batch` on each of the processes."""

    batch: int
    micro_batch: int
    accumulation: int
    processes: int

    def first(self, micro_step: int, rank: int) -> int:
        """Return the position in the global batch of the first example of a micro-batch."""
        return (micro_step * self.processes + rank) * self.micro_batch


def plan_batches(batch: int, micro_batch: int, processes: int, multiple: int = 1) -> BatchPlan:
    """Choose the largest micro-batch up to the recipe's that divides a process's share; the rest is accumulation.

    `multiple`: a micro-batch is a multiple of it, if examples come in pairs or groups. Micro-batches are equal, so that
    the mean of their means is the mean over the batch. A share with no divisor near the recipe's micro-batch is
    refused: 254 examples with a micro-batch of 64 would take 127 forwards of 2 instead of 4.
    """
    if batch % (processes * multiple):
        nearest = max(1, round(batch / (processes * multiple))) * processes * multiple
        in_groups = f" in groups of {multiple}" if multiple > 1 else ""
        raise UsageError(
            f"a global batch of {batch} cannot be shared evenly by {processes} processes{in_groups}; "
            f"use --set train.batch={nearest} or another number of processes"
        )
    share = batch // processes
    sizes = [size for size in range(multiple, share + 1, multiple) if share % size == 0]
    micro = max((size for size in sizes if size <= micro_batch), default=sizes[0])
    if micro > micro_batch or share // micro >= 2 * -(-share // micro_batch):
        usable = max(multiple, micro_batch // multiple * multiple)
        nearest = max(1, round(share / usable)) * usable * processes
        larger = next(size for size in sizes if size > micro_batch)
        raise UsageError(
            f"{share} examples a process cannot be split into equal micro-batches near {micro_batch}; use --set "
            f"train.batch={nearest}, or --set train.micro_batch={larger} (or {micro})"
        )
    return BatchPlan(batch, micro, share // micro, processes)


class Objective(Protocol):
    @property
    def model(self) -> nn.Module: ...

    @property
    def batches(self) -> BatchPlan: ...

    @property
    def steps(self) -> int: ...

    @property
    def unit(self) -> str:
        """The unit of throughput: tokens or images."""

    @property
    def best_metric(self) -> str | None:
        """A metric of `validate` whose maximum marks the best checkpoint; None: only the newest are kept."""

    @property
    def units_per_step(self) -> int: ...

    @property
    def flops_per_step(self) -> float: ...

    def parameter_groups(self) -> list[ParameterGroup]: ...

    def batch(self, step: int, micro_step: int) -> Any:
        """Return a batch, a pure function of recipe, seed, step and micro-step: there is no iterator state."""

    def loss(self, batch: Any) -> Tensor: ...

    def learning_rate_multiplier(self, step: int) -> float: ...

    def after_step(self, step: int) -> None: ...

    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Return metrics, the same on every rank; call `stop_if_asked`, which raises to stop, equally often on each."""

    def describe_batch(self, step: int) -> str: ...

    def weights_metadata(self) -> dict[str, str]: ...

    def finish(self, run_dir: Any) -> dict[str, Any]:
        """After the last step, on rank 0: return results besides the weights, such as samples."""


@runtime_checkable
class Closable(Protocol):
    """An objective with resources to release: data workers, open files."""

    def close(self) -> None:
        """Release them on every rank when the run ends, however it ends."""


@runtime_checkable
class MonitorsUpdates(Protocol):
    """An objective that monitors more of an update than its loss."""

    def seen(self) -> dict[str, Tensor]:
        """Before an update, on every rank: return numbers of its micro-steps, still on the device. The loop copies
        their means over the ranks to the host with the loss, so that there is one wait for all of them."""

    def watch(self, step: int, values: dict[str, float]) -> str | None:
        """After the update, on every rank: return a warning if something is wrong with those means."""
