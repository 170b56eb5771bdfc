"""Mean pairwise cosine similarity of a sequence's tokens (CosSim of section 4.1).

ave_b  1 / (T (T - 1))  sum_{i != j} <x_i, x_j> / (|x_i| |x_j|)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lapcli.analysis.drawing import figure_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.measures.tokens import StreamingMoments, cosine_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis


class CosineSimilarity(Measurement):
    name = "cossim"
    help = "Mean pairwise cosine similarity of a sequence's tokens, by layer."
    definition = (
        "Cosine similarity of two different tokens of a sequence, averaged over all pairs and over sequences, of the "
        "output of each block."
    )
    default_layers = "all"
    columns: ClassVar = {"cosine_similarity": "cosine similarity", "cosine_similarity_std": "cosine similarity std"}
    order = 3

    def token_accumulator(self) -> CosineSimilarityAccumulator:
        return CosineSimilarityAccumulator()

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        label = "cosine similarity of two tokens,\nmean over pairs and sequences"
        return figure_by_layer(analysis.runs, "cosine_similarity", label)


class CosineSimilarityAccumulator:
    def __init__(self) -> None:
        self._similarity = StreamingMoments()
        self._tokens = 0

    def update(self, tokens_BTD: Tensor) -> None:
        self._similarity.update(cosine_similarity(tokens_BTD)[:, None])
        self._tokens = tokens_BTD.shape[1]

    def result(self) -> LayerResult:
        result = LayerResult(
            {"cosine_similarity": self._similarity.mean(), "cosine_similarity_std": self._similarity.std()}
        )
        if self._tokens == 1:
            result.notes.append("one token per sequence, so there are no pairs")
        return result
