"""Tokens on their top two principal components (4.1 and its appendix).

The sign of a component is not defined; its largest entry is made positive, so that figures can be compared.
"""

import numpy as np
from torch import Tensor

from lapcli.analysis.found import Found
from lapcli.analysis.sample import TokenSample


def principal_components(x_ND: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Projections N x count of the centred rows, the directions count x D, and each one's share of the variance.

    Directions beyond the rank are zero, and so are the shares of rows that do not vary.
    """
    centred = x_ND - x_ND.mean(axis=0)
    _, singular, directions = np.linalg.svd(centred, full_matrices=False)
    rounding = 1e-10 * max(float(np.abs(x_ND).max()), 1e-300) * np.sqrt(x_ND.size)
    energy = np.where(singular > rounding, singular, 0.0) ** 2
    kept = np.zeros((count, x_ND.shape[1]))
    shares = np.zeros(count)
    for row in range(min(count, int((energy > 0).sum()))):
        sign = np.sign(directions[row][np.abs(directions[row]).argmax()])
        kept[row], shares[row] = sign * directions[row], energy[row] / energy.sum()
    return centred @ kept.T, kept, shares


class PCA:
    def __init__(self, classes: list[int], seed: int) -> None:
        self._sample = TokenSample(classes, seed)

    def update(self, tokens_BTD: Tensor, labels: Tensor, first: int) -> None:
        self._sample.update(tokens_BTD, labels, first)

    def result(self) -> Found:
        tokens, classes = self._sample.tokens()
        if len(tokens) < 2:
            return Found(
                {"tokens_shown": len(tokens)}, notes=["fewer than two tokens of these classes: nothing to show"]
            )
        places, _, shares = principal_components(tokens, 2)
        found = Found(
            {
                "tokens_shown": len(tokens),
                "variance_share_1": float(shares[0]),
                "variance_share_2": float(shares[1]),
            },
            points={"place": places, "class": classes},
        )
        if shares[0] == 0:
            found.notes.append("all tokens are equal: they have no principal components")
        return found
