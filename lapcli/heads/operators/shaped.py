"""Shaped attention (Noci et al., 2023, arXiv 2306.17759), as He and Hofmann (2023, arXiv 2311.01906) use it.

    y = (alpha I + beta P - gamma U) v = alpha v + beta o - gamma m

All three are learnt for each head and start at 1: with small logits P is near U, and the head starts near the identity.
In those papers it replaces the skip connection; here it is a head of an ordinary block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import MEAN, Dense, HeadState, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shaped(Operator):
    name = "shaped"
    letter = "H"
    needs = frozenset({MEAN})
    learnable = ("alpha", "beta", "gamma")

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    learn: tuple[str, ...] = ("alpha", "beta", "gamma")

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        assert state.mean_BHTD is not None
        alpha, beta, gamma = (self.value(name, state.parameters) for name in self.learnable)
        return alpha * v_BHTD + beta * o_BHTD - gamma * state.mean_BHTD

    def dense(self, dense: Dense) -> Tensor:
        alpha, beta, gamma = (self.value(name, dense.parameters) for name in self.learnable)
        return (alpha * dense.I_TS + beta * dense.P_BHTS - gamma * dense.U_BHTS) @ dense.v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return 7 * head_size
