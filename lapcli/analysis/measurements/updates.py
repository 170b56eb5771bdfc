"""The update that each head adds to the residual stream (Motivation 1 and Figure 2).

    head h adds  u_t = y_t W_o, times LayerScale;  y = P v (attention), v - P v (Laplacian), or what its operator gives
    m_t = (P x)_t  mean of the tokens, weighted by the head's attention

Along the mean: cosine of u_t with m_t. Towards it: cosine of u_t with m_t - x_t. And the relative change of the
within-sequence variance if u alone is added: (V(x + u) - V(x)) / V(x), V = ave_t |x_t - mean|^2.

Shapes: B sequences, T tokens, C channels, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lapcli.analysis.drawing import figure_by_head, number_or_nan
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.measures.tokens import ROUNDING, StreamingMoments, to_float64

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture, HeadInputs

#: The values of a head: heading in the table, label in the figure.
QUANTITIES = {
    "cosine_with_mean": ("along", "cosine of the update\nwith the weighted mean"),
    "cosine_towards_mean": ("towards", "cosine of the update\nwith mean minus token"),
    "variance_change": ("variance", "relative change of the\nwithin-sequence variance"),
}


class HeadUpdates(Measurement):
    name = "updates"
    definition = (
        "A head adds u_t to token x_t of the residual stream; m_t is the mean of the tokens weighted by its attention. "
        "Cosine of u_t with m_t and with m_t - x_t, averaged over tokens; variance_change: the effect of u_t alone "
        "on the variance within the sequence, as a fraction of it."
    )
    default_layers = "all"
    columns: ClassVar = {
        f"{kind}_{name}": f"{short} {heading}"
        for name, (heading, _) in QUANTITIES.items()
        for kind, short in (("attention", "A"), ("laplacian", "L"), ("other", "O"))
    }

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        operators = self.model.plan.operator_names(layer)
        heads = [StreamingMoments() for _ in operators]
        capture.on_heads(layer, lambda inputs, _: add_updates(heads, inputs))
        return lambda: result_of(heads, operators)

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        return figure_by_head(analysis.runs, {name: title for name, (_, title) in QUANTITIES.items()})


def attention_matrix(inputs: HeadInputs, head: int) -> Tensor:
    """Return P of one head, B x T x T, as a dense matrix, in the model's own precision."""
    import torch

    q, k = inputs.q_BHTD[:, head], inputs.k_BHTD[:, head]
    logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if inputs.causal:
        T = logits.shape[-1]
        logits.masked_fill_(torch.ones(T, T, dtype=torch.bool, device=logits.device).triu(1), float("-inf"))
    return logits.softmax(dim=-1)


def head_update(inputs: HeadInputs, head: int, y_BHTD: Tensor) -> Tensor:
    """Return u, B x T x C, the update of this head, without the output projection's bias, which belongs to no head.

    `y_BHTD` is `inputs.outputs()`.
    """
    y_BTD = y_BHTD[:, head]
    D = y_BTD.shape[-1]
    # nn.Linear stores out x in: the columns of this head's slice of the concatenated outputs.
    u_BTC = y_BTD @ inputs.out_CI[:, head * D : (head + 1) * D].T
    return u_BTC if inputs.scale_C is None else u_BTC * inputs.scale_C


def add_updates(heads: Sequence[StreamingMoments], inputs: HeadInputs) -> None:
    """Add the updates of a batch, head by head, so that only one T x T matrix for each sequence is held at a time."""
    import torch

    x_BTC = to_float64(inputs.x_BTC)
    before_B = _variance(x_BTC)
    varies_B = before_B > ROUNDING * x_BTC.square().sum(dim=2).mean(dim=1)
    # With the model's own operators, so that the updates of all heads and the bias sum to the layer's update.
    y_BHTD = inputs.outputs()
    for head, moments in enumerate(heads):
        P_BTT = attention_matrix(inputs, head)
        u_BTC = to_float64(head_update(inputs, head, y_BHTD))
        # The mean is of the residual stream x, not of the normed tokens that q, k and v are made from.
        m_BTC = to_float64(P_BTT @ inputs.x_BTC)
        change_B = torch.where(varies_B, (_variance(x_BTC + u_BTC) - before_B) / before_B, torch.nan)
        along_B, towards_B = (_mean_cosine(u_BTC, other) for other in (m_BTC, m_BTC - x_BTC))
        moments.update(torch.stack([along_B, towards_B, change_B], dim=1))


def result_of(heads: Sequence[StreamingMoments], operators: list[str]) -> LayerResult:
    result = LayerResult(words={"operators": operators})
    for column, name in enumerate(QUANTITIES):
        result.series[name] = np.array([number_or_nan(moments.mean(column)) for moments in heads])
    kinds = np.array([_kind(operator) for operator in operators])
    result.series["is_laplacian"] = (kinds == "laplacian").astype(float)
    for kind in ("attention", "laplacian", *(["other"] if "other" in kinds else [])):
        for name in QUANTITIES:
            values = result.series[name][kinds == kind]
            known = values[values == values]
            result.values[f"{kind}_{name}"] = float(known.mean()) if len(known) else None
    return result


def _kind(operator: str) -> str:
    return operator if operator in ("attention", "laplacian") else "other"


def _variance(x_BTC: Tensor) -> Tensor:
    return (x_BTC - x_BTC.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1)


def _mean_cosine(a_BTC: Tensor, b_BTC: Tensor) -> Tensor:
    """Return the mean cosine over the tokens of each sequence for which both vectors have a direction; NaN if none do.

    The first token of a causal sequence attends to itself alone: its mean minus itself is zero.
    """
    import torch

    lengths_BT = a_BTC.norm(dim=2) * b_BTC.norm(dim=2)
    # The difference of nearly equal tokens is only rounding error, without a direction.
    known_BT = lengths_BT > 1e-6 * a_BTC.norm(dim=2).amax(dim=1, keepdim=True) * b_BTC.norm(dim=2).amax(1, keepdim=True)
    cosine_BT = torch.where(known_BT, (a_BTC * b_BTC).sum(dim=2) / torch.where(known_BT, lengths_BT, 1), 0)
    count_B = known_BT.sum(dim=1)
    return torch.where(count_B > 0, cosine_BT.sum(dim=1) / count_B.clamp(min=1), torch.nan)
