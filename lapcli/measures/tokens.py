"""Measures of the tokens of a sequence, as pure functions: eigenvalues, k_alpha, cosine similarity, components.

torch is imported inside the one function that needs it: the declarations of the analyses import this module, and
`lap analyze --help` reads them without torch.

Shapes: B sequences, T tokens, D channels, R = min(T, D) ranks, N tokens of any sequence.
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
    values_BR = torch.linalg.eigvalsh(gram).flip(-1).clamp_(min=0)
    values_BR[values_BR.sum(dim=1) <= ROUNDING * tokens_BTD.square().sum(dim=(1, 2))] = 0
    return values_BR


def k_alpha(eigenvalues_BR: Tensor, alpha: float) -> Tensor:
    """Return the fewest leading eigenvalues whose sum reaches alpha of the total; NaN if the tokens do not vary."""
    total_B1 = eigenvalues_BR.sum(dim=1, keepdim=True)
    # A share that is reached exactly must not be missed by the last bit of the sum.
    reached_BR = eigenvalues_BR.cumsum(dim=1) >= (alpha - 1e-12) * total_B1
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
