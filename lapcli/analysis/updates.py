"""What each head adds to the residual stream (Motivation 1 and Figure 2).

    head h adds  u_t = (P v)_t W_o   (attention)   or   (v_t - (P v)_t) W_o   (Laplacian), times LayerScale
    m_t = (P x)_t  mean of the tokens, weighted by the head's attention

Along the mean: cosine of u_t with m_t. Towards it: cosine of u_t with m_t - x_t. And what adding u alone does to the
variance within the sequence: (V(x + u) - V(x)) / V(x), V = ave_t |x_t - mean|^2.

Shapes: B sequences, T tokens, C channels, H heads, D head size.
"""

import numpy as np
import torch
from torch import Tensor

from lapcli.analysis.anatomy import HeadInputs, double
from lapcli.analysis.found import Found
from lapcli.analysis.running import Running

NAMES = ("cosine_with_mean", "cosine_towards_mean", "variance_change")


def attention_matrix(inputs: HeadInputs, head: int) -> Tensor:
    """P of one head, B x T x T, written out in float64."""
    q, k = double(inputs.q_BHTD[:, head]), double(inputs.k_BHTD[:, head])
    logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if inputs.causal:
        T = logits.shape[-1]
        logits.masked_fill_(torch.ones(T, T, dtype=torch.bool, device=logits.device).triu(1), float("-inf"))
    return logits.softmax(dim=-1)


def head_update(inputs: HeadInputs, head: int, P_BTT: Tensor) -> Tensor:
    """u, B x T x C: what this head adds (the output projection's bias belongs to no head)."""
    v_BTD = double(inputs.v_BHTD[:, head])
    y_BTD = P_BTT @ v_BTD
    if head >= inputs.q_BHTD.shape[1] - inputs.laplacian_heads:
        y_BTD = v_BTD - y_BTD
    D = v_BTD.shape[-1]
    u_BTC = y_BTD @ double(inputs.out_CI)[:, head * D : (head + 1) * D].T
    return u_BTC if inputs.scale_C is None else u_BTC * double(inputs.scale_C)


class Updates:
    """One layer; heads one after the other, so that one T x T matrix a sequence is held at a time."""

    def __init__(self, heads: int, laplacian_heads: int) -> None:
        self._heads = [Running() for _ in range(heads)]
        self._first_laplacian = heads - laplacian_heads
        self._constant = self._sequences = self._silent = 0

    def update(self, inputs: HeadInputs) -> None:
        x_BTC = double(inputs.x_BTC)
        before_B = _variance(x_BTC)
        varies_B = before_B > 1e-20 * x_BTC.square().sum(dim=2).mean(dim=1)
        self._sequences += len(x_BTC)
        self._constant += int((~varies_B).sum())
        for head, running in enumerate(self._heads):
            P_BTT = attention_matrix(inputs, head)
            u_BTC = head_update(inputs, head, P_BTT)
            m_BTC = P_BTT @ x_BTC
            change_B = torch.where(varies_B, (_variance(x_BTC + u_BTC) - before_B) / before_B, torch.nan)
            along_B, towards_B = (_mean_cosine(u_BTC, other) for other in (m_BTC, m_BTC - x_BTC))
            running.update(torch.stack([along_B, towards_B, change_B], dim=1))
            self._silent += int((u_BTC == 0).all())

    def result(self) -> Found:
        found = Found()
        for column, name in enumerate(NAMES):
            found.series[name] = _column(self._heads, column)
        is_laplacian = np.arange(len(self._heads)) >= self._first_laplacian
        found.series["is_laplacian"] = is_laplacian.astype(float)
        for kind, chosen in (("attention", ~is_laplacian), ("laplacian", is_laplacian)):
            for name in NAMES:
                values = found.series[name][chosen]
                known = values[values == values]
                found.values[f"{kind}_{name}"] = float(known.mean()) if len(known) else None
        if self._silent:
            found.notes.append("heads whose output projection is zero add nothing and have no direction")
        if self._constant:
            found.notes.append(
                f"the tokens of {self._constant:,} of {self._sequences:,} sequences are equal: no variance to change"
            )
        return found


def _column(heads: list[Running], column: int) -> np.ndarray:
    known = [running.count_D is not None and running.count_D[column] > 0 for running in heads]
    pairs = zip(heads, known, strict=True)
    return np.array([running.mean_D[column] if is_known else np.nan for running, is_known in pairs])


def _variance(x_BTC: Tensor) -> Tensor:
    return (x_BTC - x_BTC.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1)


def _mean_cosine(a_BTC: Tensor, b_BTC: Tensor) -> Tensor:
    """Over the tokens of each sequence where both have a direction; not a number where none has.

    The first token of a causal sequence attends to itself alone: its mean minus itself is zero.
    """
    lengths_BT = a_BTC.norm(dim=2) * b_BTC.norm(dim=2)
    # Of a difference of nearly equal tokens rounding is left, which has no direction either.
    known_BT = lengths_BT > 1e-12 * a_BTC.norm(dim=2).amax(dim=1, keepdim=True) * b_BTC.norm(dim=2).amax(
        1, keepdim=True
    )
    cosine_BT = torch.where(known_BT, (a_BTC * b_BTC).sum(dim=2) / torch.where(known_BT, lengths_BT, 1), 0)
    count_B = known_BT.sum(dim=1)
    return torch.where(count_B > 0, cosine_BT.sum(dim=1) / count_B.clamp(min=1), torch.nan)
