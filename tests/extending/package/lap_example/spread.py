"""An analysis: how far the tokens of a sequence are from their mean, relative to their length."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lapcli.analysis.drawing import figure_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture


class Spread(Measurement):
    name = "spread"
    help = "Distance of the tokens from their mean, by layer."
    definition = "Mean squared distance of the tokens of a sequence from their mean over their mean squared length."
    options = ("layer", "tokens")
    default_layers = "all"
    columns: ClassVar = {"spread": "spread"}

    def listen(self, capture: Capture, layer: int) -> SpreadAccumulator:
        from lapcli.measures.capture import Site

        accumulator = SpreadAccumulator()
        capture.on_tokens(Site(layer, "output", self.settings.tokens), lambda tokens, _: accumulator.update(tokens))
        return accumulator

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        return figure_by_layer(analysis.runs, "spread", "share of the tokens' length\nthat is not their mean")


class SpreadAccumulator:
    def __init__(self) -> None:
        self._distance = self._length = 0.0

    def update(self, tokens_BTD: Tensor) -> None:
        tokens_BTD = tokens_BTD.double()
        self._distance += float((tokens_BTD - tokens_BTD.mean(dim=1, keepdim=True)).square().sum())
        self._length += float(tokens_BTD.square().sum())

    def result(self) -> LayerResult:
        return LayerResult({"spread": self._distance / self._length})
