"""The learned parameters of head operators: alpha, beta, strengths and gates, by layer and head.

A number that is learned for each head is shown unchanged, the gate of an exclusive head as tanh(a), and a gate that
depends on the input as its mean over tokens. A learned mix `alpha v + beta o` shows what the network chooses: attention
at alpha / beta = 0, the Laplacian at -1.

Shapes: B sequences, T tokens, C width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lapcli.analysis.drawing import figure_by_head
from lapcli.analysis.measurement import LayerResult, Measurement, NotApplicable, Settings, Value
from lapcli.measures.tokens import to_float64

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture, HeadInputs


class OperatorMixing(Measurement):
    name = "mixing"
    help = "Learned parameters of head operators, by layer and head."
    definition = (
        "Learned parameters of each head's operators: unchanged, the gate of exclusive heads as its tanh, gates of "
        "the input as their mean over tokens."
    )
    options = ("layer",)
    default_layers = "all"
    columns: ClassVar = {}
    order = 10

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

        capture.on_heads(layer, lambda inputs, _: add_numbers(sums, len(operators), inputs))
        return result

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        names = dict.fromkeys(name for run in analysis.runs for each in run.layers.values() for name in each.series)
        if not names:
            return None
        return figure_by_head(analysis.runs, {name: name.replace("_", " ") for name in names})


def add_numbers(sums: dict[str, Any], heads: int, inputs: HeadInputs) -> None:
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
                # A head may have a gate for each channel; the mean over them is shown.
                add("gate", end - count, to_float64(gates_NI).mean(0).view(count, -1).mean(1))
        end -= count
    for name, (first, numbers_H) in inputs.operators.learned_values().items():
        add(name, first, to_float64(numbers_H))
