"""AttnScale (Wang et al., 2022, arXiv 2203.05962): `y = (U + (1 + s)(P - U)) v = o + s (o - m)`.

It amplifies the deviation of attention from the mean `m` of the visible values. `strength` s is learnt for each head
and starts at 0, which is plain attention. Under a causal mask `U` is uniform over the tokens so far, our own extension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import MEAN, Dense, HeadState, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttnScale(Operator):
    name = "attnscale"
    letter = "S"
    needs = frozenset({MEAN})
    learnable = ("strength",)

    strength: float = 0.0
    learn: tuple[str, ...] = ("strength",)

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        assert state.mean_BHTD is not None
        return o_BHTD + self.value("strength", state.parameters) * (o_BHTD - state.mean_BHTD)

    def dense(self, dense: Dense) -> Tensor:
        strength = self.value("strength", dense.parameters)
        return (dense.U_BHTS + (1 + strength) * (dense.P_BHTS - dense.U_BHTS)) @ dense.v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return 5 * head_size
