"""Measures of tokens as pure functions: bits per byte, eigenvalues, k_alpha, cosine similarity; and their statistics.

Means and spreads of a stream are merged batch by batch in float64 (Welford's update in the form of Chan et al.), so
that memory does not grow with the number of examples.

torch is imported inside the one function that needs it: the declarations of the analyses import this module, and
`lap analyze --help` reads them without torch. Inputs are tensors, stored values numpy arrays.

Shapes: B sequences, T tokens, D channels or numbers, R = min(T, D) ranks, N tokens or examples of any sequence.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import numpy as np

from lapcli.runtime.devices import has_float64
from lapcli.runtime.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

#: Below this fraction of the tokens' squared length, the remainder after centring is rounding error.
ROUNDING = 1e-20


def bits_per_byte(nats: float, count: float, text: str) -> float:
    """Convert `nats` over `count` bytes. A text without bytes is an error: 0.0 would be the best possible result."""
    if count <= 0:
        raise DataError(f"{text} has no bytes, so that bits per byte are not defined; hold out other or more text")
    return nats / (math.log(2) * count)


def to_float64(x: Tensor) -> Tensor:
    """Convert on the same device, or on the CPU if the device has no float64."""
    x = x.detach()
    return x.double() if has_float64(x.device) else x.cpu().double()


def eigenvalues(tokens_BTD: Tensor) -> Tensor:
    """Return the eigenvalues of X~^T X~ with X~ = X - 1 mu^T, B x R, largest first, never negative, in float64.

    X~^T X~ (D x D) and X~ X~^T (T x T) have the same eigenvalues up to zeros, so the smaller of the two is used. For a
    sequence of equal tokens all are exactly 0.
    """
    import torch

    centred_BTD = tokens_BTD - tokens_BTD.mean(dim=1, keepdim=True)
    T, D = centred_BTD.shape[1:]
    transposed = centred_BTD.transpose(1, 2)
    gram = centred_BTD @ transposed if T < D else transposed @ centred_BTD
    # eigvalsh returns eigenvalues of 0 as small numbers of either sign.
    values_BR = torch.linalg.eigvalsh(gram).flip(-1).clamp_(min=0)
    # The mean of equal tokens is inexact in its last bit, which leaves eigenvalues of rounding error.
    values_BR[values_BR.sum(dim=1) <= ROUNDING * tokens_BTD.square().sum(dim=(1, 2))] = 0
    return values_BR


def k_alpha(eigenvalues_BR: Tensor, alpha: float) -> Tensor:
    """Return the fewest leading eigenvalues whose sum reaches alpha of the total; NaN if the tokens do not vary."""
    total_B1 = eigenvalues_BR.sum(dim=1, keepdim=True)
    # A fraction that is reached exactly must not be missed because of the sum's last bit.
    reached_BR = eigenvalues_BR.cumsum(dim=1) >= (alpha - 1e-12) * total_B1
    # argmax returns the first of equal maxima, here the first True.
    k_B = reached_BR.double().argmax(dim=1).double() + 1
    return k_B.where(total_B1[:, 0] > 0, float("nan"))


def cosine_similarity(tokens_BTD: Tensor) -> Tensor:
    """Return the mean over pairs of different tokens of <x_i, x_j> / (|x_i| |x_j|), one number per sequence.

    With u = x / |x| the sum over pairs is |sum u|^2 - sum |u|^2: no T x T matrix. NaN for a sequence of one token. A
    zero token has cosine 0 with all others.
    """
    T = tokens_BTD.shape[1]
    length_BT1 = tokens_BTD.norm(dim=2, keepdim=True)
    unit_BTD = (tokens_BTD / length_BT1.clamp(min=sys.float_info.min)).where(length_BT1 > 0, 0)
    pairs_B = unit_BTD.sum(dim=1).square().sum(dim=1) - unit_BTD.square().sum(dim=(1, 2))
    return pairs_B / (T * (T - 1)) if T > 1 else pairs_B.new_full(pairs_B.shape, float("nan"))


class StreamingMoments:
    """Mean and standard deviation of vectors, by column; NaN entries are skipped."""

    def __init__(self) -> None:
        self.count_D: np.ndarray | None = None
        self.mean_D: np.ndarray
        self._squares_D: np.ndarray

    def update(self, values_ND: Tensor) -> None:
        values = values_ND.detach().cpu().double().numpy()
        known = ~np.isnan(values)
        count = known.sum(axis=0)
        # A column that is NaN in the full batch has count 0 and must not make the merged mean NaN.
        mean = np.where(known, values, 0).sum(axis=0) / np.maximum(count, 1)
        squares = np.where(known, (values - mean) ** 2, 0).sum(axis=0)
        if self.count_D is None:
            self.count_D, self.mean_D, self._squares_D = count, mean, squares
            return
        total = self.count_D + count
        delta = mean - self.mean_D
        self.mean_D = self.mean_D + delta * count / np.maximum(total, 1)
        self._squares_D = self._squares_D + squares + delta**2 * self.count_D * count / np.maximum(total, 1)
        self.count_D = total

    @property
    def std_D(self) -> np.ndarray:
        """Standard deviation over all examples, divided by their number (not by one less)."""
        assert self.count_D is not None
        return np.sqrt(self._squares_D / np.maximum(self.count_D, 1))

    def mean(self, column: int = 0) -> float | None:
        """Return the mean of a column; None if every value was NaN."""
        return float(self.mean_D[column]) if self._is_known(column) else None

    def std(self, column: int = 0) -> float | None:
        """Return the deviation of a column; None if every value was NaN."""
        return float(self.std_D[column]) if self._is_known(column) else None

    def _is_known(self, column: int) -> bool:
        return self.count_D is not None and bool(self.count_D[column] > 0)
