"""Cross entropy between given targets and softmax(x W^T / temperature) that never holds all student logits.

    l_n = -sum_k t_nk log softmax(x_n W^T / T)_k = (sum_k t_nk) logsumexp(z_n) - sum_k t_nk z_nk,    z = x W^T / T
    dl_n/dz_nk = (sum_k t_nk) softmax(z_n)_k - t_nk

The plain way keeps logits, log-probabilities and their gradients, each N x K. Here the rows go through in chunks, and
since the loss is a scalar each chunk's gradients are taken on the spot.

Shapes: N student rows, M target rows, D width, K prototypes, R rows of a chunk, J targets of a row.
"""

from typing import Any

import torch
from torch import Tensor

from lapcli.objectives.dino.sinkhorn import row_chunks

#: Matrix products of fewer rows would wait for the prototypes to be read.
FEWEST_ROWS = 128


def target_cross_entropy(
    x_ND: Tensor,
    prototypes_KD: Tensor,
    targets_MK: Tensor,
    weights_N: Tensor,
    temperature: float,
    rows_NJ: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """sum_n weights_n l_n, and each l_n by itself without a gradient.

    `rows_NJ` says which targets a row has, as many as there are numbers that are not -1; their cross entropies are
    added. None: row n has target n.
    """
    total, each_N = _TargetCrossEntropy.apply(x_ND, prototypes_KD, targets_MK, weights_N, temperature, rows_NJ)
    return total, each_N


class _TargetCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        prototypes_KD: Tensor,
        targets_MK: Tensor,
        weights_N: Tensor,
        temperature: float,
        rows_NJ: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wanted = any(ctx.needs_input_grad[:2])
        dtype = targets_MK.dtype
        w_KD = prototypes_KD.to(x_ND.dtype)
        each_N = torch.zeros(len(x_ND), dtype=dtype, device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if wanted else None
        dw_KD = torch.zeros_like(prototypes_KD, dtype=dtype) if wanted else None
        chunks = row_chunks(len(x_ND), len(w_KD), x_ND.device, FEWEST_ROWS)
        buffer = torch.empty((len(chunks[0]) if chunks else 0, len(w_KD)), dtype=dtype, device=x_ND.device)
        for rows in chunks:
            x_RD = x_ND[rows.start : rows.stop]
            t_RK = _targets(targets_MK, rows, rows_NJ)
            z_RK = _scaled_logits(x_RD, w_KD, 1 / temperature, buffer[: len(rows)])
            mass_R = t_RK.sum(1)
            dots_R = (t_RK[:, None, :] @ z_RK[:, :, None]).view(-1)
            most_R1 = z_RK.amax(1, keepdim=True)
            sums_R = z_RK.sub_(most_R1).exp_().sum(1)
            each_N[rows.start : rows.stop] = mass_R * (sums_R.log() + most_R1[:, 0]) - dots_R
            if dx_ND is None or dw_KD is None:
                continue
            scale_R = weights_N[rows.start : rows.stop].to(dtype) / temperature
            z_RK.mul_((scale_R * mass_R / sums_R)[:, None]).addcmul_(t_RK, scale_R[:, None], value=-1)
            dz_RK = z_RK.to(x_ND.dtype)
            torch.mm(dz_RK, w_KD, out=dx_ND[rows.start : rows.stop])
            if dz_RK.dtype == dtype:
                dw_KD.addmm_(dz_RK.t(), x_RD)
            else:
                dw_KD += dz_RK.t() @ x_RD
        ctx.gradients = None if dx_ND is None or dw_KD is None else (dx_ND, dw_KD.to(prototypes_KD.dtype))
        ctx.mark_non_differentiable(each_N)
        return (each_N * weights_N).sum(), each_N

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss can be differentiated once; compute the loss again")
        dx_ND, dw_KD = ctx.gradients
        ctx.gradients = None  # scaled in place: a copy would cost the memory this saves
        return dx_ND.mul_(gradient), dw_KD.mul_(gradient), None, None, None, None


def _targets(targets_MK: Tensor, rows: range, rows_NJ: Tensor | None) -> Tensor:
    """The sum of each row's targets."""
    if rows_NJ is None:
        return targets_MK[rows.start : rows.stop]
    chosen_RJ = rows_NJ[rows.start : rows.stop]
    total_RK = targets_MK[chosen_RJ[:, 0]]
    for chosen_R in chosen_RJ[:, 1:].unbind(1):
        total_RK.addcmul_(targets_MK[chosen_R.clamp(min=0)], (chosen_R >= 0).to(total_RK.dtype)[:, None])
    return total_RK


def _scaled_logits(x_RD: Tensor, w_KD: Tensor, factor: float, out_RK: Tensor) -> Tensor:
    if x_RD.dtype == out_RK.dtype:  # the factor rides on the matrix product
        return torch.addmm(out_RK, x_RD, w_KD.t(), beta=0, alpha=factor, out=out_RK)
    return out_RK.copy_(x_RD @ w_KD.t()).mul_(factor)
