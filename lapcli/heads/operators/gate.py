"""Gated attention (Qiu et al., 2025, arXiv 2505.06708): `y = o * sigmoid(x W)`, x the layer's normed input.

`form: headwise` has one gate for each head and token (W is C x H), `elementwise` one for each channel of a head as well
(C x H D). W has no bias and is drawn with a deviation of 0.02, so that gates start near a half: not plain attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import INPUT, Dense, HeadState, Learnt, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Gate(Operator):
    name = "gate"
    letter = "G"
    needs = frozenset({INPUT})
    choices = {"form": ("headwise", "elementwise")}  # noqa: RUF012

    form: str = "headwise"

    def parameters(self, heads: int, head_size: int, width: int) -> dict[str, Learnt]:
        outputs = heads * (head_size if self.form == "elementwise" else 1)
        return {"weight": Learnt((outputs, width), deviation=0.02)}

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        assert state.x_BTC is not None
        weight_IC = state.parameters["weight"].to(state.x_BTC.dtype)
        gates_BTI = (state.x_BTC @ weight_IC.mT).sigmoid()  # I: H gates, or H x D
        return o_BHTD * gates_BTI.unflatten(-1, (o_BHTD.shape[1], -1)).transpose(1, 2)

    def dense(self, dense: Dense) -> Tensor:
        """Compute diag(g) P v, head after head."""
        import torch

        o_BHTD = dense.P_BHTS @ dense.v_BHSD
        rows = dense.parameters["weight"].chunk(o_BHTD.shape[1])
        heads = zip(o_BHTD.split(1, dim=1), rows, strict=True)
        gated = [o_B1TD / (1 + (-(dense.x_BTC @ rows_IC.mT)[:, None]).exp()) for o_B1TD, rows_IC in heads]
        return torch.cat(gated, dim=1)

    def flops(self, head_size: int, width: int) -> int:
        gates = head_size if self.form == "elementwise" else 1
        return gates * 2 * width + head_size
