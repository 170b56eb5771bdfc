"""Means and spreads of a stream, in float64, merged batch by batch (Welford's update in the form of Chan et al.).

Memory does not grow with the number of examples: `ClassMoments` has one row for each class.

Shapes: N examples of a batch, D numbers each, C classes, K classes that are in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # tensors come in, numpy arrays are stored: torch need not be imported
    from torch import Tensor


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
        delta_KD = mean_KD.cpu().numpy() - self.mean_CD[rows]
        before, added = self.count_C[rows], count_K.cpu().numpy()
        weight_K = before * added / (before + added)
        self.mean_CD[rows] += delta_KD * (added / (before + added))[:, None]
        self.squares_C[rows] += squares_K.cpu().numpy() + weight_K * (delta_KD**2).sum(axis=1)
        self.count_C[rows] = before + added
        if extra_N is not None:
            sums_K = x_ND.new_zeros(len(present_K)).index_add_(0, row_N, extra_N.double())
            self.extra_C[rows] += sums_K.cpu().numpy()
        if self.scatter_DD is not None:
            moved_KD = x_ND.new_tensor(np.sqrt(weight_K)[:, None] * delta_KD)
            self.scatter_DD += (deviation_ND.T @ deviation_ND + moved_KD.T @ moved_KD).cpu().numpy()
