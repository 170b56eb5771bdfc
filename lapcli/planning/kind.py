"""What a plan asks of each kind of training."""

from typing import Any, Protocol

import torch

from lapcli.heads.plan import HeadPlan
from lapcli.planning.plan import Plan
from lapcli.planning.sketch import Sketch


class Kind(Protocol):
    #: Of how many examples a micro-batch is a multiple.
    multiple: int
    #: Whether the best checkpoint is kept beside the newest.
    keeps_best: bool

    @property
    def head_plan(self) -> HeadPlan: ...

    @property
    def steps(self) -> int | None: ...

    def sketch(self, device: torch.device, bf16: bool, layers: int | None = None, compiled: bool = False) -> Sketch:
        """The model and its step on a device; `layers` instead of the recipe's."""

    def download(self) -> tuple[int | None, str]:
        """Bytes that are not on this machine yet, and the same in words."""

    def plan(self, shared: dict[str, Any]) -> Plan:
        """The kind's own counts beside the ones that all share."""


def with_layers(recipe: Any, layers: int | None) -> Any:
    """The recipe with another number of layers, none of whose heads are Laplacian: FLOPs are the same."""
    if layers is None:
        return recipe
    model = recipe.model.model_copy(update={"layers": layers, "laplacian_heads": 0})
    return recipe.model_copy(update={"model": model})
