"""What each head does, by layer and head: `sinks`, `ov` and `mixing`.

sinks   where it attends, and the cosine similarity of attention's output and the token's own value

    to_first = ave_t P_t0        to_self = ave_t P_tt        cosine = ave_t cos(o_t, v_t),  o = P v

A head without a use for its input can attend to the first token, a sink. Laplacian and exclusive heads add or remove
the token's own value, so the part of attention's output along it matters. P is computed in blocks of rows, so that
there is never a T x T matrix for all heads.

ov      the map of a head from its input to its output, without attention: does it keep the sign of its input?

    M_h = W_O,h W_V,h, C x C, of rank at most the head size D; its nonzero eigenvalues are those of W_V,h W_O,h, D x D
    mean_eigenvalue = tr(M_h) / D
    symmetric = |(M_h + M_h^T) / 2|_F^2 / |M_h|_F^2        diagonal = sum_c (M_h)_cc^2 / |M_h|_F^2

With a positive mean eigenvalue a plain head adds an average of tokens to each of them, which smooths, and a Laplacian
head sharpens; with a negative eigenvalue the reverse holds. Norms and LayerScale are ignored. Only weights are read.

mixing  the learned parameters of head operators: alpha, beta, strengths and gates

A parameter per head is shown unchanged, the gate of an exclusive head as tanh(a), and a gate that
depends on the input as its mean over tokens. A learned mix `alpha v + beta o` shows what the network chooses: attention
at alpha / beta = 0, the Laplacian at -1.

Shapes: B sequences, H heads, G key and value heads, T tokens, R rows of a block, D head size, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lapcli.analysis.drawing import figure_by_head, number_or_nan
from lapcli.analysis.measurement import LayerResult, Measurement, NotApplicable, Settings, Value
from lapcli.measures.tokens import StreamingMoments, to_float64

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture, HeadInputs

SINK_QUANTITIES = {
    "to_first": "mean attention\nto the first token",
    "to_self": "mean attention\nto the token itself",
    "cosine_with_value": "cosine of attention's\noutput and the value",
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
            for row, name in enumerate(SINK_QUANTITIES):
                means = [number_or_nan(moments.mean(row * heads + head)) for head in range(heads)]
                found.series[name] = np.array(means)
                found.values[name] = float(np.mean(means)) if np.isfinite(means).all() else None
            return found

        capture.on_heads(layer, add)
        return result

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        return figure_by_head(analysis.runs, SINK_QUANTITIES)


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


OV_QUANTITIES = {
    "mean_eigenvalue": "mean eigenvalue\nof $W_O W_V$",
    "symmetric": "symmetric fraction\nof $W_O W_V$",
    "diagonal": "diagonal fraction\nof $W_O W_V$",
}


class Ov(Measurement):
    name = "ov"
    definition = (
        "Of each head's W_O W_V: its trace over the head size, which is the mean of the eigenvalues that can differ "
        "from 0; the fraction of its squared norm in the symmetric part, and on the diagonal. Layer values are means "
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
        return figure_by_head(analysis.runs, OV_QUANTITIES)


def value_and_output(attention: Any) -> tuple[Tensor, Tensor]:
    """Return W_V, G D x C, and W_O, C x H D, of the attention of our GPT, our DINO or timm."""
    own = getattr(attention, "v", None) or getattr(attention, "v_proj", None)
    value = attention.qkv.weight.chunk(3)[2] if own is None else own.weight
    return value.detach(), (attention.out if hasattr(attention, "out") else attention.proj).weight.detach()


def head_ov(value_VC: Tensor, output_CI: Tensor, heads: int) -> dict[str, Tensor]:
    """Return the three quantities of each head in float64, using only D x D products."""
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


class OperatorMixing(Measurement):
    name = "mixing"
    definition = (
        "Learned parameters of each head's operators: unchanged, the gate of exclusive heads as its tanh, gates of "
        "the input as their mean over tokens."
    )
    default_layers = "all"
    columns: ClassVar = {}

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        if not any(claim.operator.adds_parameters for layer in model.plan.layers for claim in layer):
            raise NotApplicable(
                "no head operator of this model learns anything; mixing shows what model.operators learn"
            )

    @classmethod
    def shown_columns(cls, values: Mapping[str, Value]) -> dict[str, str]:
        return {name: name.replace("_", " ") for name in values}

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        operators = self.model.plan.operator_names(layer)
        sums: dict[str, Any] = {}

        def result() -> LayerResult:
            found = LayerResult(words={"operators": operators})
            for name, total in sums.items():
                found.series[name] = total / capture.tokens
                found.values[name] = float(np.nanmean(found.series[name]))
            return found

        capture.on_heads(layer, lambda inputs, _: add_learned(sums, len(operators), inputs))
        return result

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        names = dict.fromkeys(name for run in analysis.runs for each in run.layers.values() for name in each.series)
        if not names:
            return None
        return figure_by_head(analysis.runs, {name: name.replace("_", " ") for name in names})


def add_learned(sums: dict[str, Any], heads: int, inputs: HeadInputs) -> None:
    """Add the numbers of a batch, weighted by its tokens: gates of the input are averaged, the rest is constant."""
    end = heads  # operators claim heads from the last one on
    tokens = inputs.normed_BTC.shape[0] * inputs.normed_BTC.shape[1]

    def add(name: str, first: int, values_H: Tensor) -> None:
        series = np.full(heads, np.nan)  # NaN of the other heads stays NaN in the sum
        series[first : first + len(values_H)] = values_H.cpu().numpy()
        sums[name] = sums.get(name, 0.0) + series * tokens

    for operator, count in inputs.operators.claims:
        if operator.name == "gate":  # its matrix is a projection of the input; that of another operator may be any
            for parameter in inputs.operators.learned(operator).values():
                gates_NI = (inputs.normed_BTC.flatten(0, 1) @ parameter.mT.to(inputs.normed_BTC.dtype)).sigmoid()
                # A head may have one gate per channel; their mean is shown.
                add("gate", end - count, to_float64(gates_NI).mean(0).view(count, -1).mean(1))
        end -= count
    for name, (first, numbers_H) in inputs.operators.learned_values().items():
        add(name, first, to_float64(numbers_H))
