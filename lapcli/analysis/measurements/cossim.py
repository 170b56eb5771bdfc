"""Mean pairwise cosine similarity of a sequence's tokens (CosSim of section 4.1).

ave_b  1 / (T (T - 1))  sum_{i != j} <x_i, x_j> / (|x_i| |x_j|)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from lapcli.analysis.drawing import figure_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.measures.tokens import StreamingMoments, cosine_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture


class CosineSimilarity(Measurement):
    name = "cossim"
    definition = (
        "Cosine similarity of two different tokens of a sequence, averaged over all pairs and over sequences, of the "
        "output of each block."
    )
    default_layers = "all"
    columns: ClassVar = {"cosine_similarity": "cosine similarity"}

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        similarity = StreamingMoments()
        capture.on_tokens(self.site(layer), lambda tokens, _: similarity.update(cosine_similarity(tokens)[:, None]))
        return lambda: LayerResult({"cosine_similarity": similarity.mean()})

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        label = "cosine similarity of two tokens,\nmean over pairs and sequences"
        return figure_by_layer(analysis.runs, "cosine_similarity", label)
