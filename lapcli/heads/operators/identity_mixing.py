"""Identity mixing, `y = alpha v + beta o`, and its two ends: attention (0, 1) and the control `value-only` (1, 0).

The Laplacian head is (1, -1). The output projection absorbs the scale and the sign of a head, so only the ratio of
alpha to beta matters: with a learnt alpha that starts at 0 each head chooses between attention and, up to sign and
scale, the Laplacian. A head of `value-only` sees only its own values, which shows the effect of `I` in `I - P`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lapcli.heads.operators.operator import Dense, HeadState, Operator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Mix(Operator):
    name = "mix"
    letter = "M"
    learnable = ("alpha", "beta")

    alpha: float = 0.0
    beta: float = 1.0
    learn: tuple[str, ...] = ()

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        alpha, beta = (self.value(name, state.parameters) for name in self.learnable)
        # A constant of 0 or 1 is skipped instead of multiplied: `alpha: 0, beta: 1` is bitwise attention.
        scaled_BHTD = o_BHTD if _is(beta, 1) else beta * o_BHTD
        return scaled_BHTD if _is(alpha, 0) else scaled_BHTD + alpha * v_BHTD

    def dense(self, dense: Dense) -> Tensor:
        alpha, beta = (self.value(name, dense.parameters) for name in self.learnable)
        return (alpha * dense.I_TS + beta * dense.P_BHTS) @ dense.v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return 3 * head_size


def _is(value: object, number: float) -> bool:
    return isinstance(value, float) and value == number


@dataclass(frozen=True)
class Attention(Operator):
    """Plain attention, to exempt some of the last heads from other operators."""

    name = "attention"
    letter = "A"

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        return o_BHTD

    def dense(self, dense: Dense) -> Tensor:
        return dense.P_BHTS @ dense.v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return 0


@dataclass(frozen=True)
class ValueOnly(Operator):
    """`y = v`: no parameters, and no attention either; queries and keys of such a head get no gradient."""

    name = "value-only"
    letter = "V"

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        return v_BHTD

    def dense(self, dense: Dense) -> Tensor:
        return dense.I_TS.expand_as(dense.P_BHTS) @ dense.v_BHSD

    def flops(self, head_size: int, width: int) -> int:
        return 0
