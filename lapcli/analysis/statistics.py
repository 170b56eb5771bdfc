"""Statistics that several measurements share: principal components, and moments of classes.

Moments are merged batch by batch in float64 (Chan et al.); memory does not grow with the number of examples.

Shapes: N tokens or examples, D channels, C classes, K classes that are in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def principal_components(x_ND: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return projections N x count of the centred rows, the directions count x D, and each one's fraction of variance.

    The sign of a component is arbitrary; its largest entry is made positive, so that figures can be compared.
    Directions beyond the rank are zero, and so are the fractions of rows that do not vary.
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


class ClassMoments:
    """For each class its number of examples, their mean, and the sum of their squared distances from it.

    With `scatter`, also the sum over all examples of (x - mean)(x - mean)^T, D x D, each about the mean of its class.
    """

    def __init__(self, classes: int, width: int, scatter: bool = False) -> None:
        self.count_C = np.zeros(classes, dtype=np.int64)
        # The system allocates zeroed memory at the first write to a row: only classes in the data take
        # memory.
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
            # The sum over classes of weight * delta delta^T, as one matmul.
            moved_KD = x_ND.new_tensor(np.sqrt(weight_K)[:, None] * delta_KD)
            self.scatter_DD += (deviation_ND.T @ deviation_ND + moved_KD.T @ moved_KD).cpu().numpy()
