"""The Laplacian head of the paper (equation 3): `y = (I - P) v = v - o`.

Rows sum to zero: a constant over the tokens vanishes, and so does the first token under a causal mask. Layers that
have only this operator use `lapcli/heads/laplacian.py`, which applies the same formula to the last heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import Dense, HeadState, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Laplacian(Operator):
    name = "laplacian"
    letter = "L"
    rows_sum_to_zero = True

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        return v_BHTD - o_BHTD

    def dense(self, dense: Dense) -> Tensor:
        return (dense.I_TS - dense.P_BHTS) @ dense.v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return head_size
