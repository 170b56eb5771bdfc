"""An analysis: the distance of a sequence's tokens from their mean, relative to their length."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.analysis.drawing import figure_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture


class Spread(Measurement):
    name = "spread"
    definition = "Mean squared distance of the tokens of a sequence from their mean over their mean squared length."
    default_layers = "all"
    columns: ClassVar = {"spread": "spread"}

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        sums = [0.0, 0.0]

        def add(tokens_BTD: Tensor, _: Any) -> None:
            sums[0] += float((tokens_BTD - tokens_BTD.mean(dim=1, keepdim=True)).square().sum())
            sums[1] += float(tokens_BTD.square().sum())

        capture.on_tokens(self.site(layer), add)
        return lambda: LayerResult({"spread": sums[0] / sums[1]})

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        return figure_by_layer(analysis.runs, "spread", "share of the tokens' length\nthat is not their mean")
