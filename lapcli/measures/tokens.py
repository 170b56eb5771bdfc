"""Measures of tokens: eigenvalues, k_alpha, cosine similarity and components as pure functions, and their statistics.

Means and spreads of a stream are merged batch by batch in float64 (Welford's update in the form of Chan et al.). Memory
does not grow with the number of examples: `ClassMoments` has one row for each class.

torch is imported inside the one function that needs it: the declarations of the analyses import this module, and
`lap analyze --help` reads them without torch. Tensors come in, numpy arrays are stored.

Shapes: B sequences, T tokens, D channels or numbers, R = min(T, D) ranks, N tokens or examples of any sequence, C
classes, K classes that are in the batch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from lapcli.runtime.devices import has_float64

if TYPE_CHECKING:
    from torch import Tensor

#: Below this share of the tokens' squared length, the remainder after centring is rounding error.
ROUNDING = 1e-20


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
    # The mean of equal tokens is off in its last bit, which leaves eigenvalues of rounding error.
    values_BR[values_BR.sum(dim=1) <= ROUNDING * tokens_BTD.square().sum(dim=(1, 2))] = 0
    return values_BR


def k_alpha(eigenvalues_BR: Tensor, alpha: float) -> Tensor:
    """Return the fewest leading eigenvalues whose sum reaches alpha of the total; NaN if the tokens do not vary."""
    total_B1 = eigenvalues_BR.sum(dim=1, keepdim=True)
    # A share that is reached exactly must not be missed by the last bit of the sum.
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


def within_sequence_share(tokens_BTD: Tensor) -> float | None:
    """Return the share of the variance that is within sequences; the rest is between them.

    It needs no classes. None if all tokens are equal.
    """
    within = (tokens_BTD - tokens_BTD.mean(dim=1, keepdim=True)).square().sum()
    total = (tokens_BTD - tokens_BTD.mean(dim=(0, 1))).square().sum()
    return float(within) / float(total) if total > ROUNDING * tokens_BTD.square().sum() else None


def principal_components(x_ND: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return projections N x count of the centred rows, the directions count x D, and each one's share of the variance.

    The sign of a component is arbitrary; its largest entry is made positive, so that figures can be compared.
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
        # A column that is NaN in the whole batch has count 0 and must not make the merged mean NaN.
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


class ClassMoments:
    """For each class its number of examples, their mean, and the sum of their squared distances from it.

    With `scatter`, also the sum over all examples of (x - mean)(x - mean)^T, D x D, each about the mean of its class.
    """

    def __init__(self, classes: int, width: int, scatter: bool = False) -> None:
        self.count_C = np.zeros(classes, dtype=np.int64)
        # Zeroed memory is allocated by the system when a row is first written: of 65,536 classes only those in the data
        # take memory.
        self.mean_CD = np.zeros((classes, width))
        self.squares_C = np.zeros(classes)
        self.extra_C = np.zeros(classes)  # sum of `extra_N`, any other quantity of an example
        self.scatter_DD = np.zeros((width, width)) if scatter else None

    def update(self, x_ND: Tensor, labels_N: Tensor, extra_N: Tensor | None = None) -> None:
        """Add float64 examples with their classes; those with a negative class are skipped."""
        keep = labels_N >= 0
        if not bool(keep.all()):
            x_ND, labels_N = x_ND[keep], labels_N[keep]
            extra_N = None if extra_N is None else extra_N[keep]
        if not len(labels_N):
            return
        present_K, row_N = labels_N.unique(return_inverse=True)
        count_K = row_N.bincount(minlength=len(present_K))
        mean_KD = x_ND.new_zeros(len(present_K), x_ND.shape[1])
        mean_KD.index_add_(0, row_N, x_ND).div_(count_K[:, None])
        deviation_ND = x_ND - mean_KD[row_N]
        squares_K = x_ND.new_zeros(len(present_K)).index_add_(0, row_N, deviation_ND.square().sum(dim=1))
        rows = present_K.cpu().numpy()
        # Distances from the means before this batch: all sums below are updated with them.
        delta_KD = mean_KD.cpu().numpy() - self.mean_CD[rows]
        before, added = self.count_C[rows], count_K.cpu().numpy()
        weight_K = before * added / (before + added)
        # `rows` has no duplicates: `+=` with an index array would add only one of them.
        self.mean_CD[rows] += delta_KD * (added / (before + added))[:, None]
        self.squares_C[rows] += squares_K.cpu().numpy() + weight_K * (delta_KD**2).sum(axis=1)
        self.count_C[rows] = before + added
        if extra_N is not None:
            sums_K = x_ND.new_zeros(len(present_K)).index_add_(0, row_N, extra_N.double())
            self.extra_C[rows] += sums_K.cpu().numpy()
        if self.scatter_DD is not None:
            # The sum over classes of weight * delta delta^T, as one product.
            moved_KD = x_ND.new_tensor(np.sqrt(weight_K)[:, None] * delta_KD)
            self.scatter_DD += (deviation_ND.T @ deviation_ND + moved_KD.T @ moved_KD).cpu().numpy()
