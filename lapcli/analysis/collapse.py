"""Neural collapse of class means and classifier, NC1 to NC4 (appendix D, after Han et al.).

    mu_c  mean of all tokens of all examples of class c;  mu_G  mean of the mu_c;  M' = [mu_c - mu_G]
    h_i   mean of the tokens of example i;                W     rows of the classifier

    NC1              tr(S_W S_B^+):  S_W = ave_i (h_i - mu_c)(h_i - mu_c)^T,  S_B = ave_c (mu_c - mu_G)(mu_c - mu_G)^T
    NC2 equinorm     std / mean of the lengths, of class means and of rows of W
    NC2 equiangular  ave_{i != j} |cos(v_i, v_j) + 1/(C-1)|
    NC3              |W^T/|W|_F - M'/|M'|_F|_F^2
    NC4              share of examples whose largest logit is not the class of the nearest class mean

The paper prints NC2 with the class means themselves, where the target -1/(C-1) cannot be reached; Han et al. centre
them. Both are given. NC4 needs all class means before the first example can be compared: the h_i, one row an example,
wait in a temporary file and not in memory.
"""

import tempfile

import numpy as np
import torch
from torch import Tensor

from lapcli.analysis.found import Found, Value
from lapcli.analysis.running import ByClass

_ROWS = 1024  # of the temporary file at once


class Collapse:
    """`classifier_CD`: W; its rows are the classes."""

    def __init__(self, classifier_CD: np.ndarray) -> None:
        self._classifier = classifier_CD
        self._sums = ByClass(*classifier_CD.shape, scatter=True)
        self._waiting = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this object
        self._predicted: list[np.ndarray] = []

    def update(self, tokens_BTD: Tensor, labels_B: Tensor) -> None:
        mean_BD = tokens_BTD.mean(dim=1)
        self._sums.update(mean_BD, labels_B)
        self._waiting.write(np.ascontiguousarray(mean_BD.cpu().numpy()).tobytes())

    def update_logits(self, logits_BC: Tensor) -> None:
        self._predicted.append(logits_BC.argmax(dim=1).cpu().numpy())

    def result(self) -> Found:
        sums = self._sums
        present = np.flatnonzero(sums.count_C > 0)
        C, D = len(present), self._classifier.shape[1]
        mean_CD, W_CD = sums.mean_CD[present], self._classifier[present]
        centred_CD = mean_CD - mean_CD.mean(axis=0)
        if np.abs(centred_CD).max(initial=0) <= 1e-13 * np.abs(mean_CD).max(initial=0):
            centred_CD = np.zeros_like(centred_CD)  # equal means leave the rounding of their mean
        found = Found({"classes": C, "examples": int(sums.count_C.sum())})
        values = found.values
        scatter_DD = sums.scatter_DD.numpy() / max(int(sums.count_C.sum()), 1)  # type: ignore[union-attr]
        values["nc1"] = _within_over_between(scatter_DD, centred_CD)
        for name, vectors in (("centred", centred_CD), ("as_printed", mean_CD), ("classifier", W_CD)):
            values[f"nc2_equinorm_{name}"] = equinorm(vectors)
            values[f"nc2_equiangular_{name}"] = equiangular(vectors)
        values["nc3"] = self_duality(W_CD, centred_CD)
        values["nc4"] = self._nearest_mean_disagrees(present, mean_CD)
        if len(self._classifier) > C:
            found.notes.append(f"{len(self._classifier) - C:,} classes have no example here; the measures are of {C:,}")
        if C == 1:
            found.notes.append("one class: its mean has nothing to be compared with, so NC1 to NC3 are not defined")
        elif values["nc3"] is None:
            found.notes.append("all class means are equal, or the classifier is zero: NC3 is not defined")
        if C - 1 > D:
            found.notes.append(f"{C:,} classes in {D:,} dimensions: a simplex of so many corners does not fit, NC2 > 0")
        if C and int(sums.count_C[present].min()) == 1:
            found.notes.append("a class with one example adds nothing to the within-class scatter of NC1")
        return found

    def _nearest_mean_disagrees(self, present: np.ndarray, mean_CD: np.ndarray) -> Value:
        if not self._predicted or not len(present):
            return None
        predicted = np.concatenate(self._predicted)
        width = self._classifier.shape[1]
        means = torch.from_numpy(mean_CD)
        self._waiting.seek(0)
        disagree = 0
        for first in range(0, len(predicted), _ROWS):
            rows = np.frombuffer(self._waiting.read(_ROWS * width * 8)).reshape(-1, width)
            # Written out and not |h|^2 - 2 h m + |m|^2, which loses the digits that near ties need.
            distance = torch.cdist(torch.from_numpy(rows.copy()), means, compute_mode="donot_use_mm_for_euclid_dist")
            nearest = present[distance.argmin(dim=1).numpy()]
            disagree += int((nearest != predicted[first : first + len(rows)]).sum())
        return disagree / len(predicted)


def equinorm(vectors_CD: np.ndarray) -> float | None:
    """Coefficient of variation of the lengths; the deviation is divided by C - 1."""
    lengths = np.linalg.norm(vectors_CD, axis=1)
    if len(lengths) < 2 or lengths.mean() <= _rounding(vectors_CD):
        return None
    return float(lengths.std(ddof=1) / lengths.mean())


def equiangular(vectors_CD: np.ndarray) -> float | None:
    C = len(vectors_CD)
    lengths = np.linalg.norm(vectors_CD, axis=1, keepdims=True)
    if C < 2 or lengths.min() <= _rounding(vectors_CD):
        return None
    unit = vectors_CD / lengths
    cosines = unit @ unit.T
    off_diagonal = ~np.eye(C, dtype=bool)
    return float(np.abs(cosines[off_diagonal] + 1 / (C - 1)).mean())


def self_duality(W_CD: np.ndarray, centred_CD: np.ndarray) -> float | None:
    lengths = np.linalg.norm(W_CD), np.linalg.norm(centred_CD)
    if min(lengths) <= _rounding(W_CD) or len(W_CD) < 2:
        return None
    return float(((W_CD / lengths[0] - centred_CD / lengths[1]) ** 2).sum())


def _within_over_between(scatter_DD: np.ndarray, centred_CD: np.ndarray) -> float | None:
    """tr(S_W S_B^+) through the singular vectors of the centred means: S_B = M' M'^T / C has rank C - 1 at most."""
    C = len(centred_CD)
    _, singular, directions = np.linalg.svd(centred_CD, full_matrices=False)
    kept = singular > max(singular.max(initial=0) * 1e-10, _rounding(centred_CD))
    kept[max(C - 1, 0) :] = False
    if not kept.any():
        return None
    inside = np.einsum("rd,de,re->r", directions[kept], scatter_DD, directions[kept])
    return float((inside / (singular[kept] ** 2 / C)).sum())


def _rounding(vectors: np.ndarray) -> float:
    return 1e-14 * float(np.abs(vectors).max(initial=0)) + 1e-300
