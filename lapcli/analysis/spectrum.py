"""Eigenvalues of the centred tokens of a sequence, and how many of them carry a share of the variance (4.2, 4.3).

    X~ = X - 1 mu^T;   lambda_1 >= lambda_2 >= ...  eigenvalues of X~^T X~
    k_alpha = fewest leading eigenvalues whose sum reaches alpha of the sum of all

Mean and standard deviation of lambda_j, and the mean of k_alpha, are over sequences. X~^T X~ (D x D) and X~ X~^T
(T x T) have the same eigenvalues beside zeros, so the smaller of the two is taken.

Shapes: B sequences, T tokens, D channels, R = min(T, D) ranks.
"""

import torch
from torch import Tensor

from lapcli.analysis.found import Found
from lapcli.analysis.running import Running

ALPHAS = (0.9, 0.99, 0.999)
#: Below this share of the tokens' squared length, what is left after centring is rounding.
_ROUNDING = 1e-20


def eigenvalues(tokens_BTD: Tensor) -> Tensor:
    """B x R, largest first, never negative; float64 in, float64 out."""
    centred_BTD = tokens_BTD - tokens_BTD.mean(dim=1, keepdim=True)
    T, D = centred_BTD.shape[1:]
    transposed = centred_BTD.transpose(1, 2)
    gram = centred_BTD @ transposed if T < D else transposed @ centred_BTD
    return torch.linalg.eigvalsh(gram).flip(-1).clamp_(min=0)


def explained(eigenvalues_BR: Tensor, alpha: float) -> Tensor:
    """k_alpha of each sequence; not a number where the tokens do not vary."""
    total_B1 = eigenvalues_BR.sum(dim=1, keepdim=True)
    # A share that is reached exactly must not be missed by the last bit of the sum.
    reached_BR = eigenvalues_BR.cumsum(dim=1) >= (alpha - 1e-12) * total_B1
    k_B = reached_BR.to(torch.float64).argmax(dim=1).to(torch.float64) + 1
    return torch.where(total_B1[:, 0] > 0, k_B, torch.nan)


class Spectrum:
    """Streams over sequences of one length."""

    def __init__(self) -> None:
        self._eigenvalues, self._k = Running(), Running()
        self._sequences = self._constant = 0
        self._tokens = 0

    def update(self, tokens_BTD: Tensor) -> None:
        values_BR = eigenvalues(tokens_BTD)
        rounding_B = _ROUNDING * tokens_BTD.square().sum(dim=(1, 2))
        constant_B = values_BR.sum(dim=1) <= rounding_B
        values_BR[constant_B] = 0
        self._eigenvalues.update(values_BR)
        self._k.update(torch.stack([explained(values_BR, alpha) for alpha in ALPHAS], dim=1))
        self._sequences += len(values_BR)
        self._constant += int(constant_B.sum())
        self._tokens = tokens_BTD.shape[1]

    def result(self) -> Found:
        found = Found()
        known = self._constant < self._sequences
        for column, alpha in enumerate(ALPHAS):
            found.values[f"k_{alpha}"] = float(self._k.mean_D[column]) if known else None
            found.values[f"k_{alpha}_std"] = float(self._k.std_D[column]) if known else None
        found.values["variance"] = float(self._eigenvalues.mean_D.sum())
        found.series = {"eigenvalue_mean": self._eigenvalues.mean_D, "eigenvalue_std": self._eigenvalues.std_D}
        if self._tokens == 1:
            found.notes.append("one token a sequence: nothing is left after centring, so k_alpha is not defined")
        elif self._constant:
            found.notes.append(
                f"the tokens of {self._constant:,} of {self._sequences:,} sequences are all equal; they have no k_alpha"
            )
        return found
