"""The elementwise work of Sinkhorn-Knopp and of the cross entropy with its targets, written for torch.compile.

The formulas are those of losses.py, in base 2: exp2 is a single instruction of a GPU. Each function becomes one or two
kernels, which read the logits, in bf16 if the run computes in it, and write no other matrix than the result. Sums over
processes are computed between the functions, and temperatures that change with the step are tensors: a Python number
would compile a new graph each time.

Bytes per logit in bf16, by Inductor's count: 16 for Sinkhorn-Knopp with three iterations, 8 for the cross entropy.

Shapes: N samples, M target rows, R rows of a chunk, J targets of a row, K prototypes.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from lapcli.models.compiling import compiled_once

LOG2_E = math.log2(math.e)


def fused_sinkhorn_targets(logits_NK: Tensor, temperature: float, iterations: int) -> Tensor:
    """Compute `sinkhorn_targets` of losses.py into a new matrix, float32 at least."""
    wide = torch.promote_types(logits_NK.dtype, torch.float32)
    factor = torch.full((), LOG2_E / temperature, dtype=wide, device=logits_NK.device)
    nothing_K = torch.zeros(logits_NK.shape[1], dtype=wide, device=logits_NK.device)
    most_K, sums_K = nothing_K - math.inf, nothing_K
    if len(logits_NK):
        most_K, sums_K = compiled_once(_column_sums)(logits_NK, factor)
    largest_K = summed(most_K.clone(), dist.ReduceOp.MAX)
    sums_K = summed(sums_K * (most_K - largest_K).exp2(), dist.ReduceOp.SUM)
    s_K = -(sums_K.log2() + largest_K)
    for _ in range(iterations - 1):
        mass_K = compiled_once(_masses)(logits_NK, factor, s_K) if len(logits_NK) else nothing_K.clone()
        s_K = s_K - summed(mass_K, dist.ReduceOp.SUM).log2()
    return compiled_once(_softmax)(logits_NK, factor, s_K) if len(logits_NK) else logits_NK.to(wide)


def summed(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce over the processes, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x, operation)
    return x


def _column_sums(logits_NK: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return each prototype's largest scaled logit, and the sum of exp2 of the differences to it."""
    scaled_NK = logits_NK.to(factor.dtype) * factor
    most_K = scaled_NK.amax(0)
    return most_K, (scaled_NK - most_K).exp2().sum(0)


def _masses(logits_NK: Tensor, factor: Tensor, s_K: Tensor) -> Tensor:
    return _softmax(logits_NK, factor, s_K).sum(0)


def _softmax(logits_NK: Tensor, factor: Tensor, s_K: Tensor) -> Tensor:
    shifted_NK = logits_NK.to(factor.dtype) * factor + s_K  # a 0-dimensional factor would not promote bf16
    e_NK = (shifted_NK - shifted_NK.amax(1, keepdim=True)).exp2()
    return e_NK / e_NK.sum(1, keepdim=True)


def fused_cross_entropy(
    z_RK: Tensor, targets_MK: Tensor, rows_RJ: Tensor | None, weights_R: Tensor, temperature: float
) -> Tensor:
    """Return each row's cross entropy from its logits z, which are overwritten with the gradients of the weighted sum.

    `rows_RJ` are the targets of each row, as in `target_cross_entropy`; None: row r has target r.
    """
    losses_R: Tensor = compiled_once(_cross_entropy)(z_RK, targets_MK, rows_RJ, weights_R, temperature)
    return losses_R


def _cross_entropy(
    z_RK: Tensor, targets_MK: Tensor, rows_RJ: Tensor | None, weights_R: Tensor, temperature: float
) -> Tensor:
    t_RK = targets_MK if rows_RJ is None else _sum_of_targets(targets_MK, rows_RJ)
    y_RK = z_RK.to(targets_MK.dtype) * (LOG2_E / temperature)
    most_R1 = y_RK.amax(1, keepdim=True)
    e_RK = (y_RK - most_R1).exp2()
    sums_R, mass_R, dots_R = e_RK.sum(1), t_RK.sum(1), (t_RK * y_RK).sum(1)
    scale_R = weights_R / temperature
    z_RK.copy_(e_RK * (scale_R * mass_R / sums_R)[:, None] - t_RK * scale_R[:, None])
    return (mass_R * (sums_R.log2() + most_R1[:, 0]) - dots_R) / LOG2_E


def _sum_of_targets(targets_MK: Tensor, rows_RJ: Tensor) -> Tensor:
    parts = [torch.where(rows_R[:, None] >= 0, targets_MK[rows_R.clamp(min=0)], 0.0) for rows_R in rows_RJ.unbind(1)]
    return sum(parts[1:], start=parts[0])
