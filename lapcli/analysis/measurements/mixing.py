"""The learnt numbers of head operators: alpha, beta, strengths and gates, by layer and head.

A number that is learnt for each head is shown unchanged, the gate of an exclusive head as tanh(a), and a gate that
depends on the input as its mean over tokens. A learnt mix `alpha v + beta o` shows what the network chooses: attention
at alpha / beta = 0, the Laplacian at -1.

Shapes: B sequences, T tokens, C width, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    from lapcli.measures.capture import Capture
    from lapcli.models.anatomy import HeadInputs


class OperatorMixing(Measurement):
    name = "mixing"
    help = "What head operators have learnt, by layer and head."
    definition = (
        "Learnt numbers of the operators of each head: as they are, the gate of exclusive heads as its tanh, gates of "
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

    def listen(self, capture: Capture, layer: int) -> MixingAccumulator:
        accumulator = MixingAccumulator(self.model.plan.operator_names(layer))
        capture.on_heads(layer, lambda inputs, _: accumulator.update(inputs))
        return accumulator

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        names = dict.fromkeys(name for run in analysis.runs for each in run.layers.values() for name in each.series)
        if not names:
            return None
        return figure_by_head(analysis.runs, {name: name.replace("_", " ") for name in names})


class MixingAccumulator:
    """The numbers of one layer. Gates that depend on the input are averaged over tokens, the rest is constant."""

    def __init__(self, operators: list[str]) -> None:
        self._operators = operators
        self._sums: dict[str, Any] = {}
        self._tokens = 0

    def update(self, inputs: HeadInputs) -> None:
        end = len(self._operators)  # operators claim heads from the last one on
        tokens = inputs.normed_BTC.shape[0] * inputs.normed_BTC.shape[1]
        self._tokens += tokens
        for operator, count in inputs.operators.claims:
            if operator.name == "gate":  # its matrix is a projection of the input; that of another operator may be any
                for parameter in inputs.operators.learnt(operator).values():
                    gates_NI = (inputs.normed_BTC.flatten(0, 1) @ parameter.mT.to(inputs.normed_BTC.dtype)).sigmoid()
                    # A head may have a gate for each channel; the mean over them is shown.
                    self._add("gate", end - count, to_float64(gates_NI).mean(0).view(count, -1).mean(1), tokens)
            end -= count
        for name, (first, numbers_H) in inputs.operators.learnt_numbers().items():
            self._add(name, first, to_float64(numbers_H), tokens)

    def _add(self, name: str, first: int, values_H: Tensor, tokens: int) -> None:
        """Add the values of heads from `first` on; the other heads have none."""
        series = np.full(len(self._operators), np.nan)
        series[first : first + len(values_H)] = values_H.cpu().numpy()
        # Weighted by tokens, because the last batch may be smaller. The NaN of other heads stays NaN in the sum.
        self._sums[name] = self._sums.get(name, 0.0) + series * tokens

    def result(self) -> LayerResult:
        result = LayerResult(words={"operators": self._operators})
        for name, sums in self._sums.items():
            series = sums / self._tokens
            result.series[name] = series
            result.values[name] = float(np.nanmean(series))
        return result
