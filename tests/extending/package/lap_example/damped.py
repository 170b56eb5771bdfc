"""A head operator: attention that keeps a learned fraction of the token's own value, `y = (1 - s) o + s v`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators import HeadState, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Damped(Operator):
    name = "damped"
    letter = "D"
    learnable = ("share",)

    share: float = 0.25
    learn: tuple[str, ...] = ("share",)

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        return o_BHTD + self.value("share", state.parameters) * (v_BHTD - o_BHTD)
