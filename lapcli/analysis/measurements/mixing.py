"""The learned parameters of head operators: alpha, beta, strengths and gates, by layer and head.

A parameter that is learned for each head is shown unchanged, the gate of an exclusive head as tanh(a), and a gate that
depends on the input as its mean over tokens. The figure also shows the numbers over training, where the recipe logged
them (`validation.smoothing: true`). A learned mix `alpha v + beta o` shows what the network chooses:
attention at alpha / beta = 0, the Laplacian at -1.

Shapes: B sequences, T tokens, C width, H heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lapcli.analysis.drawing import figure_by_head
from lapcli.analysis.measurement import LayerResult, Measurement, NotApplicable, Settings, Value
from lapcli.measures.tokens import to_float64
from lapcli.runs import METRICS
from lapcli.training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis, ModelResult
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture
    from lapcli.models.anatomy import HeadInputs

_LOGGED = re.compile(r"smoothing_(?P<name>.+)_layer_(?P<layer>\d+)_head_(?P<head>\d+)")
_MOST_NAMED = 8  # layers in a legend


class OperatorMixing(Measurement):
    name = "mixing"
    help = "What head operators have learned, by layer and head."
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
        logged = [_logged(run) for run in analysis.runs]
        over_training = [name for name in names if any(name in each for each in logged)]
        titles = {name: name.replace("_", " ") for name in names}
        figure = figure_by_head(analysis.runs, titles, more=len(over_training))
        columns = len(titles) + len(over_training)
        for number, each in enumerate(logged):
            for place, name in enumerate(over_training):
                # `figure.axes` lists the panels row by row.
                panel = figure.axes[number * columns + len(titles) + place]
                _draw_over_training(panel, each.get(name, {}), titles[name], name == over_training[-1])
        return figure


Lines = dict[tuple[int, int], list[tuple[int, float]]]  # of each (layer, head): its value at steps


def _logged(run: ModelResult) -> dict[str, Lines]:
    """Return what validations logged of each learned parameter; empty for a model that was not trained here."""
    logged: dict[str, Lines] = {}
    if run.model.path is None or run.model.weights != "trained":
        return logged
    for line in read_metrics(run.model.path / METRICS):
        for key, value in line.items():
            if match := _LOGGED.fullmatch(key):
                lines = logged.setdefault(match["name"], {})
                lines.setdefault((int(match["layer"]), int(match["head"])), []).append((line["step"], value))
    return logged


def _draw_over_training(panel: Any, lines: Lines, title: str, is_last: bool) -> None:
    """Draw a line for each head, coloured by its layer; the last panel of a row names them beside it."""
    from matplotlib import colormaps

    layers = sorted({layer for layer, _ in lines})
    named: set[int] = set()
    for (layer, _), points in sorted(lines.items()):
        steps, values = zip(*points, strict=True)
        colour = colormaps["viridis"](0.9 * layers.index(layer) / max(1, len(layers) - 1))
        panel.plot(
            steps, values, color=colour, linewidth=1, alpha=0.8, label=None if layer in named else f"layer {layer}"
        )
        named.add(layer)
    panel.set_xlabel("step")
    panel.set_ylabel(title)
    panel.set_title("over training")
    if is_last and 0 < len(layers) <= _MOST_NAMED:
        panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))


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
