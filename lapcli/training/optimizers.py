"""The interface of optimizers, and the optimizers of an objective's parameter groups, with a state of named tensors.

To add one, subclass `Optimizer`, give it a recipe section, and name it in `OPTIMIZERS`, or from another package with
`extensions.add("optimizer", ...)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lapcli.checkpoint import load_tensors
from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import AdamWSection, OptimizerSection
from lapcli.runtime.plugins import Registry


class Optimizer(ABC):
    """One optimizer: its name and section in a recipe, how it is built, and its state for a parameter.

    With several processes parameters, averaged gradients and states are shards, DTensors of torch: elementwise code
    works on them as it is.
    """

    name: ClassVar[str]
    section: ClassVar[type[OptimizerSection]]  # its section of a recipe, whose `options` are those of the groups
    clips_itself: ClassVar[bool] = False  # the loop then only computes the gradient norm, for the metrics
    group_state: ClassVar[tuple[str, ...]] = ()  # parts of the state that the optimizer holds once for a group

    @abstractmethod
    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """Build the optimizer of all groups that name it, with one entry of `param_groups` per group, in order."""

    @abstractmethod
    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state of a parameter, by name, on the devices where the optimizer has it.

        A checkpoint stores these tensors, and `lap plan` counts their bytes, with a parameter on the meta device.
        """

    def state_bytes(self, p: Tensor) -> int:
        state = self.new_state(torch.empty_like(p, device="meta"))
        return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def state_bytes(groups: Sequence[ParameterGroup]) -> int:
    """Return the size of the optimizer states of all parameters in bytes."""
    return sum(OPTIMIZERS[group.optimizer].state_bytes(p) for group in groups for p in group.parameters.values())


def as_param_groups(groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """Convert groups to the format of torch's optimizers."""
    return [{"params": list(group.parameters.values()), "lr": group.lr, **group.options} for group in groups]


class AdamW(Optimizer):
    """AdamW: torch's own, fused on devices that have a fused kernel."""

    name = "adamw"
    section = AdamWSection
    # Where the count of steps is on the parameter's device, because a fused kernel reads it; elsewhere on the CPU.
    counts_on: ClassVar[tuple[str, ...]] = ("cuda", "meta")

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        devices = {p.device.type for group in groups for p in group.parameters.values()}
        return torch.optim.AdamW(as_param_groups(groups), fused=devices <= {"cpu", "cuda"})

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        count = torch.zeros((), dtype=torch.float32, device=p.device if p.device.type in self.counts_on else "cpu")
        # In the dtype of the parameter: the moments of a bf16 embedding are bf16, as in nanochat.
        return {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class Lamb(AdamW):
    """LAMB: timm's, which scales AdamW's update of each parameter by the ratio of its norms.

    It clips the norm of all gradients that it updates, so all groups share one optimizer, and it counts the steps once
    for each group, on the CPU.
    """

    name = "lamb"
    clips_itself = True
    counts_on = ("meta",)
    group_state = ("step",)

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        from timm.optim.lamb import Lamb as TimmLamb

        # timm reads the clipping from the defaults, not from the groups.
        clip = groups[0].options.get("max_grad_norm", 1.0)
        return TimmLamb(as_param_groups(groups), lr=groups[0].lr, max_grad_norm=clip)


ADAMW, LAMB = AdamW(), Lamb()
OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    {"adamw": f"{__name__}:ADAMW", "lamb": f"{__name__}:LAMB", "muon": "lapcli.training.muon:MUON"},
)


class Optimizers:
    """The optimizers of all groups, stepped together; the schedule multiplies each group's learning rate."""

    def __init__(self, groups: list[ParameterGroup]) -> None:
        self.groups = groups
        by_name: dict[str, list[ParameterGroup]] = {}
        self._clipped: dict[str, list[Tensor]] = {}  # sets of parameters that share a gradient norm
        for group in groups:
            by_name.setdefault(group.optimizer, []).append(group)
            self._clipped.setdefault(group.clipped_with, []).extend(group.parameters.values())
        self._optimizers = {name: OPTIMIZERS[name].build(members) for name, members in by_name.items()}
        self.clip_themselves = any(OPTIMIZERS[name].clips_itself for name in by_name)
        # Each group's entry of `param_groups`, whose lr and options change with the step.
        parts = {name: iter(optimizer.param_groups) for name, optimizer in self._optimizers.items()}
        self._inner = [next(parts[group.optimizer]) for group in groups]

    def set_learning_rates(self, multiplier: float) -> None:
        for group, inner in zip(self.groups, self._inner, strict=True):
            inner["lr"] = group.lr * multiplier

    def set_options(self, step: int) -> None:
        """Set the options that depend on the step; after the learning rates, which they may override."""
        for group, inner in zip(self.groups, self._inner, strict=True):
            if group.at_step is not None:
                inner.update(group.at_step(step))

    def gradient_norms(self) -> list[Tensor]:
        """Return the norm of each set of parameters that is clipped together, on their device."""
        gradients = ([p.grad for p in parameters if p.grad is not None] for parameters in self._clipped.values())
        norms = [torch.nn.utils.get_total_norm(each) for each in gradients]
        return [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]

    def clip(self, limit: float | None, norms: Sequence[Tensor], known: Sequence[float]) -> None:
        """Clip the gradients of each set of parameters whose norm exceeds the limit; None: no limit.

        `known` are the norms on the host, from the copy that it waits for anyway: below the limit nothing is done,
        which saves a pass over all gradients. The factor is computed on the device.
        """
        if limit is None or self.clip_themselves:
            return
        for parameters, norm, number in zip(self._clipped.values(), norms, known, strict=True):
            if number > limit:
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    def step(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Return the state as tensors named `<state>/<parameter>`, independent of the number of ranks.

        A parameter without a gradient so far has its initial state.
        """
        named = {}
        for name, holder, key, initial in self._tensors():
            value = torch.as_tensor(holder.get(key, initial), dtype=initial.dtype)
            named[name] = value.clone() if value.ndim == 0 else value  # one file cannot hold a group's count twice
        return named

    def load_state(self, source: Path) -> None:
        """Load tensors returned by `state`, from a file or from parts."""
        tensors = list(self._tensors())
        load_tensors(source, {name: initial for name, _, _, initial in tensors})
        for _, holder, key, initial in tensors:
            holder[key] = initial

    def _tensors(self) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
        """Yield each tensor of the state: its name, the dictionary and the key that hold it, and its initial value."""
        for group, inner in zip(self.groups, self._inner, strict=True):
            declared, optimizer = OPTIMIZERS[group.optimizer], self._optimizers[group.optimizer]
            for name, p in group.parameters.items():
                for key, initial in declared.new_state(p).items():
                    holder = inner if key in declared.group_state else optimizer.state[p]
                    yield f"{key}/{name}", holder, key, initial
