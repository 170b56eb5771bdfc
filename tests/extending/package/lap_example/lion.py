"""An optimizer: Lion, which moves every weight by the sign of an average of gradients (Chen et al., 2023).

u = sign(beta_1 m + (1 - beta_1) g)        w <- (1 - lr decay) w - lr u        m <- beta_2 m + (1 - beta_2) g
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import OptimizerSection, Pair
from lapcli.training.optimizers import Optimizer, as_param_groups


class LionSection(OptimizerSection):
    name: Literal["lion"] = "lion"
    betas: Pair = Field(default_factory=lambda: [0.9, 0.99])


class Lion(Optimizer):
    name = "lion"
    section = LionSection

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return SignOfAverage(as_param_groups(groups), {})

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {"average": torch.zeros_like(p)}


class SignOfAverage(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.sign(first * average + (1 - first) * p.grad), alpha=group["lr"])
                average.lerp_(p.grad, 1 - second)
