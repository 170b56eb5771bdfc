"""Tokens on their top two principal components (4.1 and its appendix)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lapcli.analysis.drawing import number_or_nan, titles
from lapcli.analysis.measurement import LayerResult, Measurement, Settings
from lapcli.analysis.statistics import principal_components
from lapcli.analysis.token_samples import TokenSample, chosen_classes, scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture

COLOURED = 10  # classes, without --classes


class PrincipalComponents(Measurement):
    name = "pca"
    definition = (
        "Tokens of a few classes, a seeded sample, minus their mean, on the two directions of largest variance."
    )
    options = ("layer", "classes")
    default_layers = "spread"
    columns: ClassVar = {"tokens_shown": "tokens shown", "variance_share_1": "share 1", "variance_share_2": "share 2"}
    counts = frozenset({"tokens_shown"})

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self._classes = chosen_classes(settings, model.examples, COLOURED)

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        sample = TokenSample(self._classes)
        capture.on_labelled_tokens(self.site(layer), sample.update)
        return lambda: _components(sample)

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw the models side by side, layer below layer; of one model, the layers side by side."""
        runs = analysis.runs
        depth = max(len(run.layers) for run in runs)
        shown = [
            (f"{title}, layer {layer}", run, run.layers[layer])
            for place in range(depth)
            for run, title in zip(runs, titles(runs), strict=True)
            for layer in list(run.layers)[place : place + 1]
        ]
        figure, drawn = scatter(shown, columns=len(runs) if len(runs) > 1 else min(3, depth))
        for panel, result in drawn:
            first, second = (number_or_nan(result.values[f"variance_share_{n}"]) for n in (1, 2))
            panel.set_xlabel(f"component 1 ({first:.0%})")
            panel.set_ylabel(f"component 2 ({second:.0%})")
            panel.set_xticks([])
            panel.set_yticks([])
            low, high = np.quantile(result.points["place"], [0.005, 0.995], axis=0)
            margin = 0.08 * np.maximum(high - low, 1e-12)  # a few tokens far out would shrink all others
            panel.set_xlim(low[0] - margin[0], high[0] + margin[0])
            panel.set_ylim(low[1] - margin[1], high[1] + margin[1])
        return figure


def _components(sample: TokenSample) -> LayerResult:
    tokens, classes = sample.tokens()
    if len(tokens) < 2:
        return LayerResult({"tokens_shown": len(tokens)})
    places, _, shares = principal_components(tokens, 2)
    values = {f"variance_share_{number}": float(share) for number, share in enumerate(shares, 1)}
    return LayerResult({"tokens_shown": len(tokens), **values}, points={"place": places, "class": classes})
