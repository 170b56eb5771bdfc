"""Tokens on their top two principal components (4.1 and its appendix)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lapcli.analysis.drawing import number_or_nan, panels, title_labels
from lapcli.analysis.measurement import CLASSES, LAYER, NORM, TOKENS, LayerResult, Measurement, Settings
from lapcli.analysis.statistics import principal_components
from lapcli.analysis.token_samples import TokenSample, chosen_classes, class_legend, classes_in_order, scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture

COLOURED = 10  # classes, without --classes


class PrincipalComponents(Measurement):
    name = "pca"
    help = "Tokens on their top two principal components, coloured by class, by layer."
    definition = (
        "Tokens of a few classes, a seeded sample, minus their mean, on the two directions of largest variance."
    )
    options = (LAYER, TOKENS, NORM, CLASSES)
    default_layers = "spread"
    columns: ClassVar = {"tokens_shown": "tokens shown", "variance_share_1": "share 1", "variance_share_2": "share 2"}
    counts = frozenset({"tokens_shown"})
    order = 7

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self._classes = chosen_classes(settings, model.examples, COLOURED)

    def listen(self, capture: Capture, layer: int) -> PrincipalComponentsAccumulator:
        accumulator = PrincipalComponentsAccumulator(self._classes, self.settings.seed)
        capture.on_labelled_tokens(self.site(layer), accumulator.update)
        return accumulator

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw one row for each run, one column for each layer."""
        runs, order = analysis.runs, classes_in_order(analysis.runs)
        if not order:
            return None
        columns = max(len(run.layers) for run in runs)
        figure, axes_RC = panels(columns, len(runs), width=2.3, height=2.2)
        for row, run, label in zip(axes_RC, runs, title_labels(runs), strict=True):
            for panel, (layer, result) in zip(row, run.layers.items(), strict=False):
                if "place" in result.points:
                    scatter(panel, result, order, run.class_names)
                    first, second = (number_or_nan(result.values[f"variance_share_{n}"]) for n in (1, 2))
                    panel.set_xlabel(f"component 1 ({first:.0%})")
                    panel.set_ylabel(f"component 2 ({second:.0%})")
                panel.set_title(f"{label}, layer {layer}")
                panel.set_xticks([])
                panel.set_yticks([])
        class_legend(figure, axes_RC[0][0], runs[0].model.label_name)
        return figure


class PrincipalComponentsAccumulator(TokenSample):
    def result(self) -> LayerResult:
        tokens, classes = self.tokens()
        if len(tokens) < 2:
            return LayerResult(
                {"tokens_shown": len(tokens)}, notes=["fewer than two tokens of these classes: nothing to show"]
            )
        places, _, shares = principal_components(tokens, 2)
        result = LayerResult(
            {
                "tokens_shown": len(tokens),
                "variance_share_1": float(shares[0]),
                "variance_share_2": float(shares[1]),
            },
            points={"place": places, "class": classes},
        )
        if shares[0] == 0:
            result.notes.append("all tokens are equal: they have no principal components")
        return result
