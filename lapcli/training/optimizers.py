"""The optimizers of an objective's parameter groups, with a state that is plain named tensors."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.runtime.devices import uses_bf16
from lapcli.training.muon import Muon
from lapcli.training.tensors import check_tensors

#: What each optimizer keeps for a parameter: tensors of its shape and dtype, but for the count of steps.
STEP = "step"
STATE = {"muon": ("momentum",), "adamw": (STEP, "exp_avg", "exp_avg_sq"), "lamb": (STEP, "exp_avg", "exp_avg_sq")}


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

    def clip(self, limit: float | None) -> float:
        """Clips the gradient, each set of parameters by its own norm; returns the norm of all of it.

        Below the limit nothing is touched, which spares a pass over all gradients. None: the norm alone.
        """
        together = self.clipped_together()
        totals = [
            torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) for parameters in together
        ]
        norms: list[float] = torch.stack(totals).tolist()  # all at once: the host waits for the GPU here
        for parameters, total, norm in zip(together, totals, norms, strict=True):
            if limit is not None and norm > limit and not self.clip_themselves:
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
        return norms[0] if len(norms) == 1 else math.hypot(*norms)

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
        """`<state>/<parameter>`: the same whatever the number of ranks, and nothing but tensors.

        A parameter that had no gradient yet has the zeros that its optimizer would begin with.
        """
        named: dict[str, Tensor] = {}
        for group, (optimizer, inner) in zip(self.groups, self._inner, strict=True):
            for name, p in group.parameters.items():
                state = dict(optimizer.state[p])
                if group.kind == "lamb":  # counts its steps once for a whole group
                    state[STEP] = float(inner.get(STEP, 0.0))
                for key in STATE[group.kind]:
                    value = state.get(key, 0.0 if key == STEP else None)
                    value = torch.zeros_like(p) if value is None else value
                    named[f"{key}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
        return named

    @torch.no_grad()
    def load_state(self, named: Mapping[str, Tensor], source: Path) -> list[str]:
        """Checks and takes over what `state` gave; returns the names of what was converted to another float."""
        expected: dict[str, Tensor] = {}
        count = torch.empty((), dtype=torch.float32, device="meta")
        for group in self.groups:
            for name, p in group.parameters.items():
                for key in STATE[group.kind]:
                    expected[f"{key}/{name}"] = count if key == STEP else p
        converted = check_tensors(source, named, expected)
        for group, (optimizer, inner) in zip(self.groups, self._inner, strict=True):
            for name, p in group.parameters.items():
                for key in STATE[group.kind]:
                    # A copy, for the tensor may be the pages of a file that will be removed.
                    value = named[f"{key}/{name}"]
                    if key != STEP:
                        optimizer.state[p][key] = value.to(p.device, p.dtype, copy=True)
                    elif group.kind == "lamb":
                        inner[STEP] = value.clone()
                    else:  # lives on the CPU unless AdamW is fused on CUDA
                        device = p.device if p.device.type == "cuda" else torch.device("cpu")
                        optimizer.state[p][key] = value.to(device, copy=True)
        return converted


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
