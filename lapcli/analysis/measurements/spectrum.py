"""Eigenvalues of the centred tokens of a sequence, and how many of them carry a fraction of the variance (4.2, 4.3).

    X~ = X - 1 mu^T;   lambda_1 >= lambda_2 >= ...  eigenvalues of X~^T X~
    k_alpha = fewest leading eigenvalues whose sum reaches alpha of the sum of all

Mean and standard deviation of lambda_j, and the mean of k_alpha, are over sequences.

Shapes: B sequences, T tokens, D channels, R = min(T, D) ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lapcli.analysis.drawing import is_one_point, legend_title, lines_of, panels, plot_bars, plot_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.measures.tokens import StreamingMoments, eigenvalues, k_alpha

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.measures.capture import Capture

ALPHAS = (0.9, 0.99, 0.999)


class Spectrum(Measurement):
    name = "spectrum"
    definition = (
        "Eigenvalues of X~^T X~ in each sequence, X~ its tokens minus their mean: mean and standard deviation by rank "
        "over sequences. k_alpha: the fewest leading eigenvalues that reach the share alpha of their sum, averaged "
        "over sequences."
    )
    columns: ClassVar = {**{f"k_{alpha}": f"k {alpha}" for alpha in ALPHAS}, "variance": "variance"}

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        by_rank, components = StreamingMoments(), StreamingMoments()

        def add(tokens_BTD: Tensor, _: Any) -> None:
            import torch

            values_BR = eigenvalues(tokens_BTD)
            by_rank.update(values_BR)
            components.update(torch.stack([k_alpha(values_BR, alpha) for alpha in ALPHAS], dim=1))

        def result() -> LayerResult:
            values = {f"k_{alpha}": components.mean(column) for column, alpha in enumerate(ALPHAS)}
            # The trace of X~^T X~, T times the mean squared distance from the mean.
            values |= {"variance": float(by_rank.mean_D.sum()), **_ends(by_rank.mean_D)}
            return LayerResult(values, {"eigenvalue_mean": by_rank.mean_D, "eigenvalue_std": by_rank.std_D})

        capture.on_tokens(self.site(layer), add)
        return result

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw the eigenvalues of the last layer by rank, and k_0.99 and k_0.999 of each recipe or layer."""
        runs, lines = analysis.runs, lines_of(analysis.runs)
        if all(result.values["k_0.99"] is None for run in runs for result in run.layers.values()):
            return None
        figure, ((left, *others),) = panels(1 if is_one_point(runs) else 3, width=3.6)
        for line in lines:
            mean, over_seeds = line.over_seeds(lambda run: run.layers[max(run.layers)].series["eigenvalue_mean"])
            std = line.runs[0].layers[max(line.runs[0].layers)].series["eigenvalue_std"]
            std = std if over_seeds is None else over_seeds
            shown = mean > 1e-12 * max(mean[0], 1e-300)  # centring makes one eigenvalue 0 up to rounding
            rank, mean, std = np.arange(1, len(mean) + 1)[shown], mean[shown], std[shown]
            left.plot(rank, mean, label=line.label, color=line.style["color"], linestyle=line.style["linestyle"])
            if len(lines) <= 3:  # more bands than that hide each other
                # A logarithmic axis cannot show a lower edge at or below zero.
                lowest = np.maximum(mean - std, mean * 1e-2)
                left.fill_between(rank, lowest, mean + std, color=line.style["color"], alpha=0.15, linewidth=0)
        if any(len(line.get_xdata()) for line in left.lines):  # a logarithmic axis without a positive value fails
            left.set_yscale("log")
            left.set_xscale("log")
        left.set_xlabel("rank of the eigenvalue")
        over = "seeds" if any(len(line.runs) > 1 for line in lines) else "sequences"
        band = f"\n(band: ± 1 SD over {over})" if len(lines) <= 3 else ""
        left.set_ylabel(f"mean eigenvalue{band}")
        handles, names = left.get_legend_handles_labels()
        title = legend_title(runs).replace("\n", " ")
        figure.legend(handles, names, title=title, loc="outside lower center", ncols=min(3, len(lines)))
        for panel, alpha in zip(others, ("0.99", "0.999"), strict=False):
            if all(len(run.layers) == 1 for run in runs):
                plot_bars(panel, runs, f"k_{alpha}")
            else:
                plot_by_layer(panel, runs, f"k_{alpha}")
            panel.set_ylabel(f"components for\n{100 * float(alpha):g}% of the variance")
        return figure


def _ends(mean_R: np.ndarray) -> dict[str, float | None]:
    """Return the geometric means of the leading hundredth of the eigenvalues and of the second half."""
    positive = mean_R[mean_R > 1e-12 * max(float(mean_R[0]), 1e-300)]  # centring makes one 0 up to rounding
    ranks = len(positive)
    parts = {"leading": positive[: max(1, ranks // 100)], "tail": positive[ranks // 2 :]}
    return {name: float(np.exp(np.log(part).mean())) if ranks else None for name, part in parts.items()}
