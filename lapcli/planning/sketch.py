"""A recipe's training step without its data: what a plan traces on the meta device and a probe runs for real."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lapcli.objectives.objective import ParameterGroup


@dataclass(frozen=True)
class Sketch:
    model: nn.Module
    groups: list[ParameterGroup]
    forward: Callable[[int], Any]  # of so many examples, made up; whatever `loss` wants
    loss: Callable[[Any], Tensor]
    after_step: Callable[[], None] = lambda: None
