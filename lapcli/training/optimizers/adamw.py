"""AdamW: torch's own, fused on devices that have a fused kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import AdamWSection
from lapcli.training.optimizers.optimizer import Optimizer, as_param_groups


class AdamW(Optimizer):
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


ADAMW = AdamW()
