"""Targets and losses of self-supervised training. Crops are stacked crop by crop: [crop, image].

Sinkhorn-Knopp turns teacher logits into targets that use all prototypes equally:

    Q = exp(z / T)
    three times:  divide each prototype by its sum over the samples of all processes,
                  then each sample by its sum over the prototypes

Dividing by constants (the sum of Q, the numbers of samples and prototypes) changes nothing, because rows end with a sum
of 1. After the prototypes are divided, Q is exp(z / T + s) with one number s for each prototype, and dividing samples
makes it softmax(z / T + s). So the iterations only update s, in chunks of rows, and the targets overwrite the logits:
one N x K matrix in all. Each prototype's largest logit (over all processes) is subtracted first; that is a part of s,
and keeps exp from overflowing if z / T exceeds 88.

The cross entropy between targets t and softmax(x W^T / T) never materialises all student logits:

    l_n = -sum_k t_nk log softmax(x_n W^T / T)_k = (sum_k t_nk) logsumexp(z_n) - sum_k t_nk z_nk,    z = x W^T / T
    dl_n/dz_nk = (sum_k t_nk) softmax(z_n)_k - t_nk

The plain computation stores logits, log-probabilities and their gradients, each N x K. Here the rows are processed in
chunks, and since the loss is a scalar each chunk's gradients are computed in the same pass.

The functions at the end are this elementwise work for torch.compile, in base 2: exp2 is a single instruction of a GPU.
Each becomes one or two kernels, which read the logits, in bf16 if the run computes in it, and write no other matrix
than the result. Sums over processes are computed between the functions, and temperatures that change with the step are
tensors: a Python number would compile a new graph each time. Bytes per logit in bf16, by Inductor's count: 16 for
Sinkhorn-Knopp with three iterations, 8 for the cross entropy.

Shapes: G global and L local crops of B images, N student rows or samples of this process, M target rows, D bottleneck,
C width, K prototypes, P patches, R rows of a chunk, J targets of a row.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lapcli.models.compiling import compiled_once
from lapcli.runtime.devices import ComputePolicy

#: Elements of a chunk: a few chunks fit into a CPU's cache; a GPU needs large kernels.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
COARSE_CHUNKS = 32
# Matrix products of fewer rows would be bound by reading the prototypes.
_FEWEST_ROWS = 128
LOG2_E = math.log2(math.e)


def dino_loss(
    student_ND: Tensor,
    prototypes_KD: Tensor,
    targets_MK: Tensor,
    images: int,
    temperature: float = 0.1,
    policy: ComputePolicy | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the cross entropy between class tokens of the student's crops and the teacher's global crops of an image.

    A local crop is compared with every global one, a global crop with every other:

        local  = sum over B images, L local and G global crops / (B L G)
        global = sum over B images and pairs of different global crops / (B G (G - 1))
        total  = (L G local + G (G - 1) global) / (L G + G (G - 1))

    With 8 local and 2 global crops the weights are 16/18 and 2/18: all 18 pairs count equally. Rows of the student
    are the G B global crops, then the L B local ones. Returns total, and local and global without a gradient.
    """
    G, crops = len(targets_MK) // images, len(student_ND) // images
    L = crops - G
    local_pairs, global_pairs = L * G, G * (G - 1)
    # Targets of crop c: all global crops except itself, so a global crop has one less, filled with -1.
    crop_C1, other_J = (torch.arange(count, device=student_ND.device) for count in (crops, G))
    crop_C1 = crop_C1[:, None]
    crop_CJ = other_J + ((crop_C1 < G) & (other_J >= crop_C1))
    crop_CJ = torch.where(crop_CJ < G, crop_CJ, -1)
    image_B = torch.arange(images, device=student_ND.device)
    rows_CBJ = torch.where(crop_CJ[:, None] >= 0, crop_CJ[:, None] * images + image_B[None, :, None], -1)
    weights_N = targets_MK.new_full((len(student_ND),), 1 / (images * (local_pairs + global_pairs)))
    total, each_N = target_cross_entropy(
        student_ND, prototypes_KD, targets_MK, weights_N, temperature, rows_CBJ.flatten(0, 1), policy
    )
    global_sum, local_sum = each_N[: G * images].sum(), each_N[G * images :].sum()
    # A recipe may have no local crops.
    return total, local_sum / max(1, images * local_pairs), global_sum / max(1, images * global_pairs)


def ibot_loss(
    student_ND: Tensor,
    prototypes_KD: Tensor,
    targets_NK: Tensor,
    weights_N: Tensor,
    temperature: float = 0.1,
    policy: ComputePolicy | None = None,
) -> Tensor:
    """Compute the cross entropy at the masked patches of the M = G B global crops:

        sum over the crops of (mean over the crop's masked patches) / M

    divided by the number of all crops, including those without a mask. Rows are the masked patches, weighted by
    `patch_weights`.
    """
    total, _ = target_cross_entropy(student_ND, prototypes_KD, targets_NK, weights_N, temperature, policy=policy)
    return total


def patch_weights(masks_MP: Tensor, hidden_N: Tensor) -> Tensor:
    """Return 1 / (masked patches of its crop) / (all crops) for each masked patch, given its index among all M P."""
    counts_M = masks_MP.sum(1).clamp(min=1)
    return (1.0 / (counts_M * len(masks_MP)))[hidden_N // masks_MP.shape[1]]


def koleo_loss(tokens_MC: Tensor, crops: int, group: int) -> Tensor:
    """Compute KoLeo, which spreads the class tokens of global crops: -log of the distance to the nearest neighbour.

        sum over crops of  (-1 / B) sum_i log(|x_i - x_nn(i)| + 1e-8),    x of length 1

    The neighbour is searched among the same crop of the `group` images of its group in the global batch. The sum over
    crops is upstream's mean times 2.
    """
    # In float32, where upstream uses bf16, in whose rounding the distances of near neighbours are lost.
    x = F.normalize(tokens_MC.float(), dim=-1).unflatten(0, (-1, group))  # crops and groups, images, C
    with torch.no_grad():
        dots = x @ x.mT
        dots.diagonal(dim1=1, dim2=2).fill_(-1)  # the smallest cosine: a token is not its own neighbour
        nearest = dots.argmax(2)
    neighbours = x.gather(1, nearest[:, :, None].expand_as(x))
    distances = F.pairwise_distance(x, neighbours, eps=1e-8)  # upstream has both 1e-8, here and before the log
    return -(distances + 1e-8).log().mean() * crops


def target_cross_entropy(
    x_ND: Tensor,
    prototypes_KD: Tensor,
    targets_MK: Tensor,
    weights_N: Tensor,
    temperature: float,
    rows_NJ: Tensor | None = None,
    policy: ComputePolicy | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sum_n weights_n l_n, and each l_n without a gradient.

    `rows_NJ` has the targets of each row, filled with -1; their cross entropies are added. None: row n has target n.
    """
    total, each_N = _TargetCrossEntropy.apply(x_ND, prototypes_KD, targets_MK, weights_N, temperature, rows_NJ, policy)
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
        policy: ComputePolicy | None,
    ) -> tuple[Tensor, Tensor]:
        needs_gradients = any(ctx.needs_input_grad[:2])
        dtype = targets_MK.dtype
        w_KD = prototypes_KD.to(x_ND.dtype)
        each_N = torch.zeros(len(x_ND), dtype=dtype, device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if needs_gradients else None
        dw_KD = torch.zeros_like(prototypes_KD, dtype=dtype) if needs_gradients else None
        fused = needs_gradients and policy is not None and policy.compiles
        chunks = row_chunks(x_ND, len(w_KD), policy, _FEWEST_ROWS)
        logits_dtype = x_ND.dtype if fused else dtype
        buffer = torch.empty((len(chunks[0]) if chunks else 0, len(w_KD)), dtype=logits_dtype, device=x_ND.device)
        for rows in chunks:
            x_RD = x_ND[rows.start : rows.stop]
            if fused and dx_ND is not None and dw_KD is not None:
                dz_RK = torch.mm(x_RD, w_KD.t(), out=buffer[: len(rows)])
                chunk_targets = targets_MK if rows_NJ is not None else targets_MK[rows.start : rows.stop]
                chosen_RJ = None if rows_NJ is None else rows_NJ[rows.start : rows.stop]
                weights_R = weights_N[rows.start : rows.stop].to(dtype)
                losses_R = fused_cross_entropy(dz_RK, chunk_targets, chosen_RJ, weights_R, temperature)
                each_N[rows.start : rows.stop] = losses_R
                _add_gradients(dz_RK, w_KD, x_RD, dx_ND[rows.start : rows.stop], dw_KD)
                continue
            t_RK = _targets(targets_MK, rows, rows_NJ)
            z_RK = _scaled_logits(x_RD, w_KD, 1 / temperature, buffer[: len(rows)])
            mass_R = t_RK.sum(1)
            # Before z is overwritten below, and as a matrix product: t * z would be another R x K matrix.
            dots_R = (t_RK[:, None, :] @ z_RK[:, :, None]).view(-1)
            most_R1 = z_RK.amax(1, keepdim=True)
            sums_R = z_RK.sub_(most_R1).exp_().sum(1)
            each_N[rows.start : rows.stop] = mass_R * (sums_R.log() + most_R1[:, 0]) - dots_R
            if dx_ND is None or dw_KD is None:
                continue
            scale_R = weights_N[rows.start : rows.stop].to(dtype) / temperature
            z_RK.mul_((scale_R * mass_R / sums_R)[:, None]).addcmul_(t_RK, scale_R[:, None], value=-1)
            _add_gradients(z_RK.to(x_ND.dtype), w_KD, x_RD, dx_ND[rows.start : rows.stop], dw_KD)
        ctx.gradients = None if dx_ND is None or dw_KD is None else (dx_ND, dw_KD.to(prototypes_KD.dtype))
        ctx.mark_non_differentiable(each_N)
        return (each_N * weights_N).sum(), each_N

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss can be differentiated once; compute the loss again")
        dx_ND, dw_KD = ctx.gradients
        ctx.gradients = None  # scaled in place below: a copy would cost the memory that this function saves
        return dx_ND.mul_(gradient), dw_KD.mul_(gradient), None, None, None, None, None


def _add_gradients(dz_RK: Tensor, w_KD: Tensor, x_RD: Tensor, dx_RD: Tensor, dw_KD: Tensor) -> None:
    torch.mm(dz_RK, w_KD, out=dx_RD)
    if dz_RK.dtype == dw_KD.dtype:  # addmm_ takes one dtype; a bf16 product is widened as it is added
        dw_KD.addmm_(dz_RK.t(), x_RD)
    else:
        dw_KD += dz_RK.t() @ x_RD


def _targets(targets_MK: Tensor, rows: range, rows_NJ: Tensor | None) -> Tensor:
    """Return the sum of each row's targets."""
    if rows_NJ is None:
        return targets_MK[rows.start : rows.stop]
    chosen_RJ = rows_NJ[rows.start : rows.stop]
    total_RK = targets_MK[chosen_RJ[:, 0]]  # every row has a first target, and indexing copies
    for chosen_R in chosen_RJ[:, 1:].unbind(1):
        total_RK.addcmul_(targets_MK[chosen_R.clamp(min=0)], (chosen_R >= 0).to(total_RK.dtype)[:, None])
    return total_RK


def _scaled_logits(x_RD: Tensor, w_KD: Tensor, factor: float, out_RK: Tensor) -> Tensor:
    if x_RD.dtype == out_RK.dtype:  # the matrix product applies the factor for free
        return torch.addmm(out_RK, x_RD, w_KD.t(), beta=0, alpha=factor, out=out_RK)
    return out_RK.copy_(x_RD @ w_KD.t()).mul_(factor)


@torch.no_grad()
def sinkhorn_targets(
    logits_NK: Tensor, temperature: float, iterations: int = 3, policy: ComputePolicy | None = None
) -> Tensor:
    """Turn logits into targets, float32 at least, whose rows sum to 1. All processes call it, each with its samples.

    The targets overwrite logits that are float32 already, unless the policy compiles.
    """
    if policy is not None and policy.compiles:
        return fused_sinkhorn_targets(logits_NK, temperature, iterations)
    scaled_NK = logits_NK.to(torch.promote_types(logits_NK.dtype, torch.float32)).div_(temperature)
    chunks = row_chunks(scaled_NK, scaled_NK.shape[1], policy)
    # A process whose crops have no mask has no chunks, but takes part in the sums over the processes.
    buffer = torch.empty_like(scaled_NK[: len(chunks[0])]) if chunks else scaled_NK
    s_K = -_log_sums(scaled_NK, chunks, buffer)  # the first iteration, in which s is 0
    for _ in range(iterations - 1):
        mass_K = scaled_NK.new_zeros(scaled_NK.shape[1])
        for rows in chunks:
            mass_K += _softmax(scaled_NK[rows.start : rows.stop], s_K, buffer[: len(rows)]).sum(0)
        # Never log 0: a prototype's entries sum to 1 before each sample is divided by its sum, at most K.
        s_K -= summed(mass_K, dist.ReduceOp.SUM).log_()
    for rows in chunks:
        part_RK = scaled_NK[rows.start : rows.stop]
        _softmax(part_RK, s_K, part_RK)
    return scaled_NK


def row_chunks(x_ND: Tensor, width: int, policy: ComputePolicy | None, fewest: int = 1) -> list[range]:
    """Return the rows of each chunk of `x`, if a row becomes `width` numbers."""
    device_type = x_ND.device.type if policy is None else policy.device_type
    size, count = max(fewest, CHUNK_ELEMENTS.get(device_type, 2**24) // width), len(x_ND)
    if policy is not None and policy.coarse:
        size = max(size, -(-count // COARSE_CHUNKS))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _log_sums(scaled_NK: Tensor, chunks: list[range], buffer: Tensor) -> Tensor:
    """Return log sum exp over the samples of all processes, for each prototype."""
    nothing = scaled_NK.new_full((scaled_NK.shape[1],), float("-inf"))
    most_K = summed(scaled_NK.amax(0) if chunks else nothing, dist.ReduceOp.MAX)
    sums_K = torch.zeros_like(most_K)
    for rows in chunks:
        sums_K += torch.sub(scaled_NK[rows.start : rows.stop], most_K, out=buffer[: len(rows)]).exp_().sum(0)
    return summed(sums_K, dist.ReduceOp.SUM).log_().add_(most_K)


def _softmax(scaled_RK: Tensor, s_K: Tensor, out_RK: Tensor) -> Tensor:
    torch.add(scaled_RK, s_K, out=out_RK)
    out_RK.sub_(out_RK.amax(1, keepdim=True)).exp_()
    return out_RK.div_(out_RK.sum(1, keepdim=True))


def fused_sinkhorn_targets(logits_NK: Tensor, temperature: float, iterations: int) -> Tensor:
    """Compute `sinkhorn_targets` into a new matrix, float32 at least."""
    wide = torch.promote_types(logits_NK.dtype, torch.float32)
    factor = torch.full((), LOG2_E / temperature, dtype=wide, device=logits_NK.device)
    nothing_K = torch.zeros(logits_NK.shape[1], dtype=wide, device=logits_NK.device)
    most_K, sums_K = nothing_K - math.inf, nothing_K
    if len(logits_NK):
        most_K, sums_K = compiled_once(_column_sums)(logits_NK, factor)
    largest_K = summed(most_K.clone(), dist.ReduceOp.MAX)  # a copy: reduced in place, and needed below
    # Each process has subtracted its own maximum; its sum is rescaled to the largest one.
    sums_K = summed(sums_K * (most_K - largest_K).exp2(), dist.ReduceOp.SUM)
    s_K = -(sums_K.log2() + largest_K)
    for _ in range(iterations - 1):
        # A copy of the zeros, since `summed` writes into it and the next iteration needs zeros again.
        mass_K = compiled_once(_masses)(logits_NK, factor, s_K) if len(logits_NK) else nothing_K.clone()
        s_K = s_K - summed(mass_K, dist.ReduceOp.SUM).log2()
    return compiled_once(_fused_softmax)(logits_NK, factor, s_K) if len(logits_NK) else logits_NK.to(wide)


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
    return _fused_softmax(logits_NK, factor, s_K).sum(0)


def _fused_softmax(logits_NK: Tensor, factor: Tensor, s_K: Tensor) -> Tensor:
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
    y_RK = z_RK.to(targets_MK.dtype) * (LOG2_E / temperature)  # the student's temperature is constant: one graph
    most_R1 = y_RK.amax(1, keepdim=True)
    e_RK = (y_RK - most_R1).exp2()
    sums_R, mass_R, dots_R = e_RK.sum(1), t_RK.sum(1), (t_RK * y_RK).sum(1)
    scale_R = weights_R / temperature
    z_RK.copy_(e_RK * (scale_R * mass_R / sums_R)[:, None] - t_RK * scale_R[:, None])
    return (mass_R * (sums_R.log2() + most_R1[:, 0]) - dots_R) / LOG2_E


def _sum_of_targets(targets_MK: Tensor, rows_RJ: Tensor) -> Tensor:
    parts = [torch.where(rows_R[:, None] >= 0, targets_MK[rows_R.clamp(min=0)], 0.0) for rows_R in rows_RJ.unbind(1)]
    return sum(parts[1:], start=parts[0])
