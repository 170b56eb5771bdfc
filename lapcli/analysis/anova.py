"""Analysis of variance of token representations (4.1, 4.2).

Images, tokens t of example i of class c, with the means mu_ic = ave_t X_tic, mu_c = ave_i mu_ic, mu_G = ave_c mu_c:

    within sequence  ave_tic |X_tic - mu_ic|^2       within class   ave_ic |mu_ic - mu_c|^2
    between classes  ave_c |mu_c - mu_G|^2           total          their sum = ave_tic |X_tic - mu_G|^2

Language: a token is an example of the class "its next token", and there is no within-sequence part.

Averages are nested, so that every class weighs the same as in the paper's formula; the same weighted by example
(a frequent next token weighs more) is given beside it. The memory is one row for each class.
"""

import numpy as np
from torch import Tensor

from lapcli.analysis.found import Found, share
from lapcli.analysis.running import ByClass


class Anova:
    """`by_token`: each token has a class of its own (language); else a sequence has one (images)."""

    def __init__(self, classes: int, width: int, *, by_token: bool, min_count: int = 2) -> None:
        self._sums = ByClass(classes, width)
        self._by_token, self._min_count = by_token, min_count

    def update(self, tokens_BTD: Tensor, labels: Tensor) -> None:
        """Labels: B x T of tokens, or B of sequences."""
        if self._by_token:
            self._sums.update(tokens_BTD.flatten(0, 1), labels.flatten())
            return
        mean_BD = tokens_BTD.mean(dim=1)
        within_B = (tokens_BTD - mean_BD[:, None]).square().sum(dim=2).mean(dim=1)
        self._sums.update(mean_BD, labels, extra_N=within_B)

    def result(self) -> Found:
        found = Found()
        seen = int((self._sums.count_C > 0).sum())
        kept = np.flatnonzero(self._sums.count_C >= self._min_count)
        count_K = self._sums.count_C[kept]
        found.values = {"classes": len(kept), "classes_left_out": seen - len(kept), "examples": int(count_K.sum())}
        if not len(kept):
            what = "next token" if self._by_token else "class"
            found.notes.append(f"no {what} has {self._min_count} examples; give more data, or lower --min-count")
        for name, weight_K in (("", np.ones(len(kept))), ("_by_example", count_K.astype(float))):
            self._parts(found, kept, count_K, weight_K / max(weight_K.sum(), 1), name)
        if len(kept) == 1:
            found.notes.append("one class: there is no variance between classes")
        if len(kept) and found.values["total"] == 0:
            found.notes.append("all tokens are equal: the variance is 0 and has no shares")
        return found

    def _parts(self, found: Found, kept: np.ndarray, count_K: np.ndarray, weight_K: np.ndarray, suffix: str) -> None:
        known = len(kept) > 0
        mean_KD = self._sums.mean_CD[kept]
        centre_D = weight_K @ mean_KD
        parts = {
            "between_class": float(weight_K @ ((mean_KD - centre_D) ** 2).sum(axis=1)),
            "within_class": float(weight_K @ (self._sums.squares_C[kept] / count_K)),
        }
        if not self._by_token:
            parts["within_sequence"] = float(weight_K @ (self._sums.extra_C[kept] / count_K))
        # Equal tokens leave the rounding of their mean.
        length = float(weight_K @ (mean_KD**2).sum(axis=1))
        if sum(parts.values()) <= 1e-20 * length:
            parts = dict.fromkeys(parts, 0.0)
        total = sum(parts.values())
        for name, value in parts.items():
            found.values[f"{name}_share{suffix}"] = share(value, total)
        for name, value in {**parts, "total": total}.items():
            found.values[f"{name}{suffix}"] = value if known else None
