"""The optimizers of an objective's parameter groups, with a state that is plain named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.runtime.devices import uses_bf16
from lapcli.runtime.errors import LapError
from lapcli.training.muon import Muon


class Optimizers:
    """All groups, stepped together; the schedule multiplies each group's own rate."""

    def __init__(self, groups: list[ParameterGroup]) -> None:
        self.groups = groups
        # LAMB clips the norm of everything it updates, so all its groups share one optimizer.
        lamb = [group for group in groups if group.kind == "lamb"]
        self._optimizers = [_build(group) for group in groups if group.kind != "lamb"]
        self._optimizers += [_build_lamb(lamb)] if lamb else []
        inner = {
            id(p): (optimizer, part)
            for optimizer in self._optimizers
            for part in optimizer.param_groups
            for p in part["params"]
        }
        self._inner = [inner[id(next(iter(group.parameters.values())))] for group in groups]

    @property
    def clip_themselves(self) -> bool:
        return any(group.kind == "lamb" for group in self.groups)

    def parameters(self) -> list[Tensor]:
        return [p for group in self.groups for p in group.parameters.values()]

    def set_learning_rates(self, multiplier: float) -> None:
        for group, (_, inner) in zip(self.groups, self._inner, strict=True):
            inner["lr"] = group.lr * multiplier

    def set_options(self, step: int) -> None:
        """What groups change by the step, after the learning rates are set."""
        for group, (_, inner) in zip(self.groups, self._inner, strict=True):
            if group.at_step is not None:
                inner.update(group.at_step(step))

    def clipped_together(self) -> list[list[Tensor]]:
        """Parameters that share a gradient norm."""
        sets: dict[str, list[Tensor]] = {}
        for group in self.groups:
            sets.setdefault(group.clipped_with, []).extend(group.parameters.values())
        return list(sets.values())

    def set_momentum(self, momentum: float) -> None:
        """Of Muon; AdamW keeps its betas."""
        for optimizer in self._optimizers:
            if isinstance(optimizer, Muon):
                for inner in optimizer.param_groups:
                    inner["momentum"] = momentum

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """`<state>/<parameter>`: the same whatever the number of ranks, and nothing but tensors."""
        named: dict[str, Tensor] = {}
        for group, (optimizer, inner) in zip(self.groups, self._inner, strict=True):
            for name, p in group.parameters.items():
                if group.kind == "lamb":  # counts its steps once for a whole group
                    named[f"step/{name}"] = torch.tensor(float(inner.get("step", 0.0)))
                for key, value in optimizer.state[p].items():
                    named[f"{key}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
        return named

    @torch.no_grad()
    def load_state(self, named: Mapping[str, Tensor]) -> None:
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for full, value in named.items():
            key, _, name = full.partition("/")
            by_parameter.setdefault(name, {})[key] = value
        for group, (optimizer, inner) in zip(self.groups, self._inner, strict=True):
            for name, p in group.parameters.items():
                saved = by_parameter.pop(name, {})
                if group.kind == "lamb":
                    inner["step"] = saved.pop("step", torch.zeros(())).cpu()
                for key, value in saved.items():
                    # AdamW's step counter lives on the CPU unless it is fused on CUDA; moments beside their weights.
                    device = p.device if value.ndim or p.device.type == "cuda" else torch.device("cpu")
                    optimizer.state[p][key] = value.to(device)
        if by_parameter:
            raise LapError(f"the optimizer state names parameters the model has not: {sorted(by_parameter)[:3]}")


def _build(group: ParameterGroup) -> torch.optim.Optimizer:
    parameters = list(group.parameters.values())
    if group.kind == "muon":
        bf16 = uses_bf16("auto", parameters[0].device)
        dtype = group.options.get("dtype") or (torch.bfloat16 if bf16 else torch.float32)
        return Muon(parameters, lr=group.lr, **{**group.options, "dtype": dtype})
    fused = parameters[0].device.type in {"cpu", "cuda"}
    return torch.optim.AdamW(parameters, lr=group.lr, fused=fused, **group.options)


def _build_lamb(groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    from timm.optim.lamb import Lamb

    parts = [{"params": list(group.parameters.values()), "lr": group.lr, **group.options} for group in groups]
    # timm reads the clipping from the defaults, not from the groups.
    return Lamb(parts, lr=groups[0].lr, max_grad_norm=groups[0].options.get("max_grad_norm", 1.0))
