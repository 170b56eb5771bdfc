"""NeuTRENO (Nguyen et al., 2023, arXiv 2312.00751): `y = o + s (v1 - v)`, v1 the same head's values in the first layer.

It pulls tokens back to their initial values. `strength` s is fixed: 0.6 in the released DeiT, 0.4 in its language
model. In the first layer v1 is v, and the head is plain attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import FIRST_VALUES, Dense, HeadState, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NeuTRENO(Operator):
    name = "neutreno"
    letter = "N"
    needs = frozenset({FIRST_VALUES})

    strength: float = 0.6

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        if state.first_v_BHTD is None:
            return o_BHTD
        return o_BHTD + self.strength * (state.first_v_BHTD - v_BHTD)

    def dense(self, dense: Dense) -> Tensor:
        own_BHTS = dense.I_TS.expand_as(dense.P_BHTS)
        return (dense.P_BHTS - self.strength * own_BHTS) @ dense.v_BHSD + self.strength * own_BHTS @ dense.first_v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return 3 * head_size
