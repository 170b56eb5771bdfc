"""Confusion of true and predicted classes, and the mean intersection over union with its interval over images.

Shapes: N pixels or images, K classes.
"""

import numpy as np
import torch
from torch import Tensor

RESAMPLES = 1000


def confusion_matrix(labels_N: Tensor, predictions_N: Tensor, classes: int, ignored: int) -> Tensor:
    """(K, K) counts: row the true class, column the predicted one; pixels of the ignored label are left out."""
    kept_N = labels_N != ignored
    pairs = labels_N[kept_N].to(torch.int64) * classes + predictions_N[kept_N].to(torch.int64)
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def overlaps(confusion_KK: Tensor) -> Tensor:
    """(2, K): pixels of each class in the intersection of truth and prediction, and in their union."""
    hit_K = confusion_KK.diagonal()
    return torch.stack([hit_K, confusion_KK.sum(dim=0) + confusion_KK.sum(dim=1) - hit_K])


def mean_iou(intersection_K: np.ndarray, union_K: np.ndarray) -> float:
    """The mean of intersection / union over the classes that occur in truth or prediction; nan if none does."""
    there = union_K > 0
    return float(np.mean(intersection_K[there] / union_K[there])) if there.any() else float("nan")


def interval_over_images(overlaps_N2K: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% interval of the mean IoU of the whole set: images drawn anew with replacement, 1,000 times."""
    count, counts_N2K = len(overlaps_N2K), overlaps_N2K.astype(np.float64)
    generator = np.random.default_rng(seed)
    resampled = []
    for _ in range(RESAMPLES):
        times_N = np.bincount(generator.integers(count, size=count), minlength=count)
        intersection_K, union_K = np.tensordot(times_N.astype(np.float64), counts_N2K, axes=1)
        resampled.append(mean_iou(intersection_K, union_K))
    low, high = np.nanquantile(resampled, [0.025, 0.975])
    return float(low), float(high)
