"""Centered self-attention (Ali, Galanti and Wolf, 2023, arXiv 2306.01610): `y = (P - U) v = o - m`.

`U` is the uniform matrix over the visible keys, and `m` the mean of their values: under a causal mask the cumulative
mean. Rows sum to zero as those of `I - P` do, but the token's own value has no special weight: the closest relative of
the Laplacian without parameters, and a control for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import MEAN, Dense, HeadState, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Centered(Operator):
    name = "centered"
    letter = "C"
    rows_sum_to_zero = True
    needs = frozenset({MEAN})

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        assert state.mean_BHTD is not None
        return o_BHTD - state.mean_BHTD

    def dense(self, dense: Dense) -> Tensor:
        return (dense.P_BHTS - dense.U_BHTS) @ dense.v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return 3 * head_size  # a sum, a division, a difference
