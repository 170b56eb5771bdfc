"""Means and spreads of a stream, in float64, merged batch by batch (Welford's update in the form of Chan et al.).

Nothing here grows with the number of examples: `ByClass` holds one row for each class, found by its index.

Shapes: N examples of a batch, D numbers each, C classes, K classes that are in the batch.
"""

import numpy as np
import torch
from torch import Tensor


class Running:
    """Mean and standard deviation of vectors; an entry that is not a number is left out of its column."""

    def __init__(self) -> None:
        self.count_D: np.ndarray | None = None
        self.mean_D: np.ndarray
        self._squares_D: np.ndarray

    def update(self, values_ND: Tensor) -> None:
        values = values_ND.detach().to("cpu", torch.float64).numpy()
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
        """Over all examples: divided by their number."""
        assert self.count_D is not None
        return np.sqrt(self._squares_D / np.maximum(self.count_D, 1))


class ByClass:
    """For each class its number of examples, their mean, and the sum of their squared distances from it.

    With `scatter`, also the sum over all examples of (x - mean)(x - mean)^T, D x D, each about the mean of its class.
    """

    def __init__(self, classes: int, width: int, scatter: bool = False) -> None:
        self.count_C = np.zeros(classes, dtype=np.int64)
        # numpy leaves rows that are never touched to the system: 65,536 classes cost what the data has of them.
        self.mean_CD = np.zeros((classes, width))
        self.squares_C = np.zeros(classes)
        self.extra_C = np.zeros(classes)  # any other quantity of an example, summed
        self.scatter_DD = torch.zeros(width, width, dtype=torch.float64) if scatter else None

    def update(self, x_ND: Tensor, labels_N: Tensor, extra_N: Tensor | None = None) -> None:
        """float64 examples with a class each; those with a negative class are left out."""
        keep = labels_N >= 0
        if not bool(keep.all()):
            x_ND, labels_N = x_ND[keep], labels_N[keep]
            extra_N = None if extra_N is None else extra_N[keep]
        if not len(labels_N):
            return
        present_K, row_N = torch.unique(labels_N, return_inverse=True)
        count_K = torch.bincount(row_N, minlength=len(present_K))
        mean_KD = torch.zeros(len(present_K), x_ND.shape[1], dtype=x_ND.dtype, device=x_ND.device)
        mean_KD.index_add_(0, row_N, x_ND).div_(count_K[:, None])
        deviation_ND = x_ND - mean_KD[row_N]
        squares_K = torch.zeros(len(present_K), dtype=x_ND.dtype, device=x_ND.device)
        squares_K.index_add_(0, row_N, deviation_ND.square().sum(dim=1))
        rows = present_K.cpu().numpy()
        delta_KD = mean_KD.cpu().numpy() - self.mean_CD[rows]
        before, here = self.count_C[rows], count_K.cpu().numpy()
        weight_K = before * here / (before + here)
        self.mean_CD[rows] += delta_KD * (here / (before + here))[:, None]
        self.squares_C[rows] += squares_K.cpu().numpy() + weight_K * (delta_KD**2).sum(axis=1)
        self.count_C[rows] = before + here
        if extra_N is not None:
            sums_K = torch.zeros(len(present_K), dtype=torch.float64, device=x_ND.device)
            self.extra_C[rows] += sums_K.index_add_(0, row_N, extra_N.to(torch.float64)).cpu().numpy()
        if self.scatter_DD is not None:
            moved_KD = torch.from_numpy(np.sqrt(weight_K)[:, None] * delta_KD)
            self.scatter_DD += (deviation_ND.T @ deviation_ND).cpu() + moved_KD.T @ moved_KD
