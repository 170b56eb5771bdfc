"""Mean pairwise cosine similarity of a sequence's tokens (CosSim of section 4.1).

    ave_b  1 / (T (T - 1))  sum_{i != j} <x_i, x_j> / (|x_i| |x_j|)

With u = x / |x| the sum over pairs is |sum u|^2 - sum |u|^2: no T x T matrix.
"""

import torch
from torch import Tensor

from lapcli.analysis.found import Found
from lapcli.analysis.running import Running


def cosine_similarity(tokens_BTD: Tensor) -> Tensor:
    """One number a sequence; not a number for a sequence of one token. A zero token has cosine 0 with all others."""
    T = tokens_BTD.shape[1]
    length_BT1 = tokens_BTD.norm(dim=2, keepdim=True)
    unit_BTD = torch.where(length_BT1 > 0, tokens_BTD / length_BT1.clamp(min=torch.finfo(torch.float64).tiny), 0)
    pairs_B = unit_BTD.sum(dim=1).square().sum(dim=1) - unit_BTD.square().sum(dim=(1, 2))
    return pairs_B / (T * (T - 1)) if T > 1 else torch.full_like(pairs_B, torch.nan)


class CosineSimilarity:
    def __init__(self) -> None:
        self._similarity = Running()
        self._zeros = self._tokens = 0

    def update(self, tokens_BTD: Tensor) -> None:
        self._similarity.update(cosine_similarity(tokens_BTD)[:, None])
        self._zeros += int((tokens_BTD == 0).all(dim=2).sum())
        self._tokens = tokens_BTD.shape[1]

    def result(self) -> Found:
        known = self._tokens > 1
        found = Found(
            {
                "cosine_similarity": float(self._similarity.mean_D[0]) if known else None,
                "cosine_similarity_std": float(self._similarity.std_D[0]) if known else None,
            }
        )
        if not known:
            found.notes.append("one token a sequence: there are no pairs")
        if self._zeros:
            found.notes.append(f"{self._zeros:,} tokens are zero and count as cosine 0 with every other")
        return found
