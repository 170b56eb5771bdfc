"""How alike the tokens of a sequence are, by layer: cosine similarity (4.1), and the mean-to-spread ratio after the
norm before the MLP (SNR of appendix C).

    CosSim   ave_b  1 / (T (T - 1))  sum_{i != j} <x_i, x_j> / (|x_i| |x_j|)
    SNR      ave_b  |mean_t x_t| / sqrt(mean_t |x_t - mean|^2)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from lapcli.analysis.drawing import figure_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.measures.tokens import ROUNDING, StreamingMoments, cosine_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture, Site


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


class SignalToNoise(Measurement):
    name = "snr"
    definition = (
        "Length of the mean token of a sequence over the root of the mean squared distance from it, averaged over "
        "sequences, of the output of the norm before the MLP."
    )
    default_layers = "all"
    columns: ClassVar = {"snr": "snr"}

    def site(self, layer: int) -> Site:
        from lapcli.measures.capture import Site

        return Site(layer, "mlp_input")

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        ratio = StreamingMoments()
        capture.on_tokens(self.site(layer), lambda tokens, _: ratio.update(signal_to_noise(tokens)[:, None]))
        return lambda: LayerResult({"snr": ratio.mean()})

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure:
        return figure_by_layer(analysis.runs, "snr", "length of the mean token\nover the spread of the tokens")


def signal_to_noise(tokens_BTD: Tensor) -> Tensor:
    """Return one number for each sequence; NaN where the tokens do not vary."""
    mean_BD = tokens_BTD.mean(dim=1)
    variance_B = (tokens_BTD - mean_BD[:, None]).square().sum(dim=2).mean(dim=1)
    length_B = mean_BD.norm(dim=1)
    return (length_B / variance_B.sqrt()).where(variance_B > ROUNDING * length_B.square(), float("nan"))
