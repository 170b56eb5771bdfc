"""The interface of optimizers, and the optimizers of an objective's parameter groups, with a state of named tensors.

To add one, subclass `Optimizer`, give it a recipe section, and name it in `OPTIMIZERS`, or from another package with
`extensions.add("optimizer", ...)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapcli.checkpoint import check_tensors
from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import AdamWSection, OptimizerSection
from lapcli.runtime.plugins import Registry


class Optimizer(ABC):
    """One optimizer: its name and section in a recipe, how it is built, and its state for a parameter.

    Every rank has the same averaged gradients and the complete state; the work of an update may be shared over the
    ranks, as Muon's is.
    """

    name: ClassVar[str]
    section: ClassVar[type[OptimizerSection]]  # its section of a recipe, whose `options` are those of the groups
    clips_itself: ClassVar[bool] = False  # the loop then only computes the gradient norm, for the metrics

    @abstractmethod
    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """Build the optimizer of all groups that name it, with one entry of `param_groups` for each, in their order."""

    @abstractmethod
    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state of a parameter, by name, on the devices where the optimizer has it.

        A checkpoint stores these tensors, and `lap plan` counts their bytes, with a parameter on the meta device.
        """

    def state_bytes(self, p: Tensor) -> int:
        state = self.new_state(torch.empty_like(p, device="meta"))
        return sum(tensor.numel() * tensor.element_size() for tensor in state.values())

    def read_state(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
        """Return the state of one parameter; the initial state if the parameter had no gradient yet."""
        state = optimizer.state[p]
        if not state:
            return self.new_state(p)
        names = self.new_state(torch.empty_like(p, device="meta"))
        return {name: torch.as_tensor(state[name], dtype=names[name].dtype) for name in names}

    def write_state(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Set the state that `read_state` returned; the optimizer owns the tensors from here on."""
        optimizer.state[p].update(state)


def as_param_groups(groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """Convert groups to the form that torch's optimizers take."""
    return [{"params": list(group.parameters.values()), "lr": group.lr, **group.options} for group in groups]


class AdamW(Optimizer):
    """AdamW: torch's own, fused on devices that have a fused kernel."""

    name = "adamw"
    section = AdamWSection

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        parts = as_param_groups(groups)
        devices = {p.device.type for group in groups for p in group.parameters.values()}
        return torch.optim.AdamW(parts, fused=devices <= {"cpu", "cuda"})

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        # torch has the count of steps on the CPU, except for the fused kernel of a GPU, which reads it.
        device = p.device if p.device.type in {"cuda", "meta"} else "cpu"
        count = torch.zeros((), dtype=torch.float32, device=device)
        # In the dtype of the parameter: the moments of a bf16 embedding are bf16, as in nanochat.
        return {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class Lamb(Optimizer):
    """LAMB: timm's, which scales AdamW's update of each parameter by the ratio of its norms.

    It clips the norm of all gradients that it updates, so all groups share one optimizer.
    """

    name = "lamb"
    section = AdamWSection
    clips_itself = True

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        from timm.optim.lamb import Lamb as TimmLamb

        # timm reads the clipping from the defaults, not from the groups.
        clip = groups[0].options.get("max_grad_norm", 1.0)
        return TimmLamb(as_param_groups(groups), lr=groups[0].lr, max_grad_norm=clip)

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        # timm has its count of steps on the CPU, whatever the device of the parameters.
        device = "meta" if p.device.type == "meta" else "cpu"
        count = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    # timm counts the steps once per group; a checkpoint stores the count with each parameter, as for AdamW.

    def read_state(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
        moments = optimizer.state[p] or self.new_state(p)
        return {**moments, "step": torch.tensor(float(group.get("step", 0.0)))}

    def write_state(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor, state: dict[str, Tensor]
    ) -> None:
        group["step"] = state.pop("step")  # the same for all parameters of a group, so each may set it
        super().write_state(optimizer, group, p, state)


ADAMW, LAMB = AdamW(), Lamb()
OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    {"adamw": f"{__name__}:ADAMW", "lamb": f"{__name__}:LAMB", "muon": "lapcli.training.muon:MUON"},
)


class Optimizers:
    """The optimizers of all groups, stepped together; the schedule multiplies each group's own rate."""

    def __init__(self, groups: list[ParameterGroup]) -> None:
        self.groups = groups
        by_name: dict[str, list[ParameterGroup]] = {}
        for group in groups:
            by_name.setdefault(group.optimizer, []).append(group)
        self._optimizers = {name: OPTIMIZERS[name].build(members) for name, members in by_name.items()}
        self.clip_themselves = any(OPTIMIZERS[name].clips_itself for name in by_name)
        # Each group's entry of `param_groups`, whose lr and options change with the step.
        inner = {
            id(group): part  # by id: a mutable dataclass has no hash
            for name, members in by_name.items()
            for group, part in zip(members, self._optimizers[name].param_groups, strict=True)
        }
        self._inner = [inner[id(group)] for group in groups]

    def parameters(self) -> list[Tensor]:
        return [p for group in self.groups for p in group.parameters.values()]

    def set_learning_rates(self, multiplier: float) -> None:
        for group, inner in zip(self.groups, self._inner, strict=True):
            inner["lr"] = group.lr * multiplier

    def set_options(self, step: int) -> None:
        """Set the options that depend on the step; after the learning rates, which they may override."""
        for group, inner in zip(self.groups, self._inner, strict=True):
            if group.at_step is not None:
                inner.update(group.at_step(step))

    def clipped_together(self) -> list[list[Tensor]]:
        """Return the sets of parameters that share a gradient norm."""
        sets: dict[str, list[Tensor]] = {}
        for group in self.groups:
            sets.setdefault(group.clipped_with, []).extend(group.parameters.values())
        return list(sets.values())

    def gradient_norms(self) -> list[Tensor]:
        """Return the norm of each set of parameters that is clipped together, on their device."""
        return [
            torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            for parameters in self.clipped_together()
        ]

    def clip(self, limit: float | None, norms: Sequence[Tensor], known: Sequence[float]) -> None:
        """Clip the gradients of each set of parameters whose norm exceeds the limit; None: no limit.

        `known` are the norms on the host, from the copy that it waits for anyway: below the limit nothing is done,
        which saves a pass over all gradients. The factor is computed on the device.
        """
        if limit is None or self.clip_themselves:
            return
        for parameters, norm, number in zip(self.clipped_together(), norms, known, strict=True):
            if number > limit:
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    def step(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state(self) -> dict[str, Tensor]:
        """Return the state as tensors named `<state>/<parameter>`, independent of the number of ranks."""
        named: dict[str, Tensor] = {}
        for declared, optimizer, inner, name, p in self._each():
            for key, value in declared.read_state(optimizer, inner, p).items():
                named[f"{key}/{name}"] = value
        return named

    @torch.no_grad()
    def load_state(self, named: Mapping[str, Tensor], source: Path) -> list[str]:
        """Check and load what `state` returned; return the names of tensors converted to another float dtype."""
        expected: dict[str, Tensor] = {}
        for declared, _, _, name, p in self._each():
            for key, value in declared.new_state(torch.empty_like(p, device="meta")).items():
                expected[f"{key}/{name}"] = value
        converted = check_tensors(source, named, expected)
        for declared, optimizer, inner, name, p in self._each():
            state = declared.new_state(p)
            for key, value in state.items():  # a copy: the tensor may be memory-mapped from a file that will be removed
                value.copy_(named[f"{key}/{name}"])
            declared.write_state(optimizer, inner, p, state)
        return converted

    def _each(self) -> Iterator[tuple[Optimizer, torch.optim.Optimizer, dict[str, Any], str, Tensor]]:
        """Yield every parameter with its optimizer and the entry of `param_groups` that has its options."""
        for group, inner in zip(self.groups, self._inner, strict=True):
            declared, optimizer = OPTIMIZERS[group.optimizer], self._optimizers[group.optimizer]
            for name, p in group.parameters.items():
                yield declared, optimizer, inner, name, p
