"""The map of a head from its input to its output, without attention: does it keep the sign of what it reads?

    M_h = W_O,h W_V,h, C x C, of rank at most the head size D; its nonzero eigenvalues are those of W_V,h W_O,h, D x D
    mean_eigenvalue = tr(M_h) / D
    symmetric = |(M_h + M_h^T) / 2|_F^2 / |M_h|_F^2        diagonal = sum_c (M_h)_cc^2 / |M_h|_F^2

With a positive mean eigenvalue a plain head adds an average of tokens to each of them, which smooths, and a Laplacian
head sharpens; with a negative one the reverse. Norms and LayerScale are left out. Only weights are read.

Shapes: H heads, G key and value heads, D head size, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.analysis.drawing import figure_by_head
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.measures.tokens import to_float64

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture

QUANTITIES = {
    "mean_eigenvalue": "mean eigenvalue\nof $W_O W_V$",
    "symmetric": "symmetric fraction\nof $W_O W_V$",
    "diagonal": "diagonal fraction\nof $W_O W_V$",
}


class Ov(Measurement):
    name = "ov"
    definition = (
        "Of each head's W_O W_V: its trace over the head size, which is the mean of the eigenvalues that can differ "
        "from 0; the share of its squared norm in the symmetric part; and on the diagonal. Values of a layer are means "
        "over its heads."
    )
    default_layers = "all"
    reads_tokens = False
    columns: ClassVar = {"mean_eigenvalue": "mean eigenvalue", "symmetric": "symmetric", "diagonal": "diagonal"}

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        operators = self.model.plan.operator_names(layer)

        def result() -> LayerResult:
            by_head = head_ov(*value_and_output(self.model.anatomy.blocks[layer].attn), len(operators))
            found = LayerResult(words={"operators": operators})
            for name, values_H in by_head.items():
                found.series[name] = values_H.cpu().numpy()
                mean = float(values_H.mean())
                found.values[name] = mean if mean == mean else None  # NaN where a head's map is zero
            return found

        return result

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        return figure_by_head(analysis.runs, QUANTITIES)


def value_and_output(attention: Any) -> tuple[Tensor, Tensor]:
    """Return W_V, G D x C, and W_O, C x H D, of the attention of our GPT, our DINO or timm."""
    own = getattr(attention, "v", None) or getattr(attention, "v_proj", None)
    value = attention.qkv.weight.chunk(3)[2] if own is None else own.weight
    return value.detach(), (attention.out if hasattr(attention, "out") else attention.proj).weight.detach()


def head_ov(value_VC: Tensor, output_CI: Tensor, heads: int) -> dict[str, Tensor]:
    """Return the three quantities of each head in float64, by products of D x D alone."""
    size = output_CI.shape[1] // heads
    value_GDC = to_float64(value_VC).view(-1, size, value_VC.shape[1])
    V_HDC = value_GDC.repeat_interleave(heads // len(value_GDC), dim=0)
    O_HCD = to_float64(output_CI).view(-1, heads, size).transpose(0, 1)
    inner_HDD = V_HDC @ O_HCD
    norm_H = ((O_HCD.mT @ O_HCD) * (V_HDC @ V_HDC.mT)).sum((1, 2))  # |M|_F^2
    return {
        "mean_eigenvalue": inner_HDD.diagonal(dim1=1, dim2=2).mean(1),
        # |(M + M^T) / 2|^2 = (|M|^2 + tr(M M)) / 2
        "symmetric": 0.5 + 0.5 * (inner_HDD * inner_HDD.mT).sum((1, 2)) / norm_H,
        "diagonal": (O_HCD * V_HDC.mT).sum(2).square().sum(1) / norm_H,
    }
