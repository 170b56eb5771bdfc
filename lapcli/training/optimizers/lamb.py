"""LAMB: timm's, which scales AdamW's update of each parameter by the ratio of its norms.

It clips the norm of all gradients that it updates, so all groups share one optimizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import AdamWSection
from lapcli.training.optimizers.optimizer import Optimizer, as_param_groups


class Lamb(Optimizer):
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


LAMB = Lamb()
