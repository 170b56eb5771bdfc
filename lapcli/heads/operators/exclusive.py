"""Exclusive self-attention (2026, arXiv 2603.09078): `y = o - (o . v / |v|^2) v`.

The component of the output along the token's own value is removed; under a causal mask the first token's output is 0.
With `gate: tanh` a head learns how much of it to remove, `y = o - tanh(a) (o . v / |v|^2) v`, starting at a = 0, which
is plain attention (modded-nanogpt's form). The projection is not linear in `v`; |v|^2 is clamped to at least 1e-8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import Dense, HeadState, Learnt, Operator

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 1e-8  # of |v|^2, as modded-nanogpt


@dataclass(frozen=True)
class Exclusive(Operator):
    name = "exclusive"
    letter = "X"
    choices = {"gate": ("none", "tanh")}  # noqa: RUF012

    gate: str = "none"

    def parameters(self, heads: int, head_size: int, width: int) -> dict[str, Learnt]:
        return {"gate": Learnt((heads,))} if self.gate == "tanh" else {}

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        length_BHT1 = v_BHTD.square().sum(-1, keepdim=True).clamp(min=SMALLEST)
        along_BHT1 = (o_BHTD * v_BHTD).sum(-1, keepdim=True) / length_BHT1
        if self.gate == "tanh":
            along_BHT1 = along_BHT1 * state.parameters["gate"].tanh()[:, None, None]
        return o_BHTD - along_BHT1 * v_BHTD

    def dense(self, dense: Dense) -> Tensor:
        """Compute (1 - g v vT / |v|^2) o, with the D x D projection of each token."""
        v_BHTD = dense.I_TS @ dense.v_BHSD
        projection_BHTDD = v_BHTD[..., :, None] * v_BHTD[..., None, :] / v_BHTD.square().sum(-1)[..., None, None]
        o_BHTD = dense.P_BHTS @ dense.v_BHSD
        removed_BHTD = (projection_BHTDD @ o_BHTD[..., None])[..., 0]
        share = dense.parameters["gate"].tanh()[:, None, None] if self.gate == "tanh" else 1
        return o_BHTD - share * removed_BHTD

    def flops(self, head_size: int, width: int) -> int:
        return 6 * head_size  # two dot products, a product, a difference
