"""Attention to the first token and to the token itself, and the cosine similarity of output and value.

    to_first = ave_t P_t0        to_self = ave_t P_tt        cosine = ave_t cos(o_t, v_t),  o = P v

A head that has no use for its input can attend to the first token, a sink. Laplacian and exclusive heads add or remove
the token's own value, so the part of attention's output along it matters. P is computed in blocks of rows, so that
there is never a T x T matrix for all heads.

Shapes: B sequences, H heads, T tokens, R rows of a block, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lapcli.analysis.drawing import figure_by_head, number_or_nan
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.measures.tokens import StreamingMoments, to_float64

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture
    from lapcli.models.anatomy import HeadInputs

QUANTITIES = {
    "to_first": "mean attention\nto the first token",
    "to_self": "mean attention\nto the token itself",
    "cosine_with_value": "cosine of attention's output\nwith the own value",
}
NUMBERS_AT_ONCE = 1 << 24  # elements of a block of rows of P


class Sinks(Measurement):
    name = "sinks"
    definition = (
        "Mean over tokens of a head's attention to the first token (the class token of a ViT) and to the token itself, "
        "and of the cosine of attention's output with the token's own value; before the head's operator."
    )
    default_layers = "all"
    columns: ClassVar = {"to_first": "to first", "to_self": "to self", "cosine_with_value": "cos(o, v)"}

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        operators, moments = self.model.plan.operator_names(layer), StreamingMoments()
        heads = len(operators)

        def add(inputs: HeadInputs, _: Any) -> None:
            import torch

            values_B3H = torch.stack(head_sinks(inputs.q_BHTD, inputs.k_BHTD, inputs.v_BHTD, inputs.causal), dim=1)
            moments.update(values_B3H.flatten(1))

        def result() -> LayerResult:
            found = LayerResult(words={"operators": operators})
            for row, name in enumerate(QUANTITIES):
                means = [number_or_nan(moments.mean(row * heads + head)) for head in range(heads)]
                found.series[name] = np.array(means)
                found.values[name] = float(np.mean(means)) if np.isfinite(means).all() else None
            return found

        capture.on_heads(layer, add)
        return result

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        return figure_by_head(analysis.runs, QUANTITIES)


def head_sinks(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three quantities of each sequence and head, B x H each, in float64."""
    import torch

    B, H, T, D = q_BHTD.shape
    rows = max(1, min(T, NUMBERS_AT_ONCE // (B * H * T)))
    # One tensor under three names: the sums below have to rebind them, since += would add to all three.
    first = to_self = cosine = torch.zeros(B, H, dtype=torch.float64)
    for begin in range(0, T, rows):
        end = min(T, begin + rows)
        place_R = torch.arange(begin, end, device=q_BHTD.device)
        logits_BHRT = q_BHTD[:, :, begin:end] @ k_BHTD.mT * D**-0.5
        if causal:
            logits_BHRT = logits_BHRT.masked_fill(torch.arange(T, device=place_R.device) > place_R[:, None], -torch.inf)
        P_BHRT = logits_BHRT.softmax(dim=-1)
        similar_BHR = torch.nn.functional.cosine_similarity(P_BHRT @ v_BHTD, v_BHTD[:, :, begin:end], dim=-1)
        # Row r of the block is token begin + r of the sequence, so the diagonal of P is shifted by `begin`.
        to_self_BHR = P_BHRT.gather(3, place_R.view(1, 1, -1, 1).expand(B, H, -1, 1))[..., 0]
        first = first + to_float64(P_BHRT[..., 0]).sum(-1).cpu()
        to_self = to_self + to_float64(to_self_BHR).sum(-1).cpu()
        cosine = cosine + to_float64(similar_BHR).sum(-1).cpu()
    return first / T, to_self / T, cosine / T
