"""Targets and losses of self-supervised training. Crops are stacked crop by crop: [crop, image].

Sinkhorn-Knopp turns teacher logits into targets that use all prototypes equally:

    Q = exp(z / T)
    three times:  divide each prototype by its sum over the samples of all processes,
                  then each sample by its sum over the prototypes

Dividing by constants (the sum of Q, the numbers of samples and prototypes) changes nothing, because rows end with a sum
of 1. After the prototypes are divided, Q is exp(z / T + s) with one number s per prototype, and dividing samples
makes it softmax(z / T + s). So the iterations only update s, in blocks of rows, and the targets overwrite the logits:
one N x K matrix in all. Each prototype's largest logit (over all processes) is subtracted first; that becomes part of
s and prevents overflow of exp if z / T exceeds 88.

The cross entropy between targets t and softmax(x W^T / T) never materialises all student logits
(`lapcli/models/chunked_loss.py`):

    l_n = -sum_k t_nk log softmax(x_n W^T / T)_k = (sum_k t_nk) logsumexp(z_n) - sum_k t_nk z_nk,    z = x W^T / T
    dl_n/dz_nk = (sum_k t_nk) softmax(z_n)_k - t_nk

The functions of a block of logits are what torch.compile fuses, in base 2: exp2 is a single instruction of a GPU. Each
becomes one or two kernels, which read the logits, in bf16 if the run computes in it, and write only the
result. Sums over processes are computed between the functions, and temperatures that change with the step are tensors:
a Python number would compile a new graph each time. Bytes per logit in bf16, by Inductor's count: 16 for Sinkhorn-Knopp
with three iterations, 8 for the cross entropy.

Shapes: G global and L local crops of B images, N student rows or samples of this process, M target rows, D bottleneck,
C width, K prototypes, P patches, R rows of a block, J targets of a row.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lapcli.models.chunked_loss import LOG2_E, chunked_loss, row_blocks
from lapcli.models.compiling import compiled_once
from lapcli.runtime.devices import ComputePolicy


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
    # Targets of crop c: all other global crops, so a global crop has one less, filled with -1.
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


def patch_weights(masks_MP: Tensor, hidden_N: Tensor) -> Tensor:
    """Return iBOT's weight of each masked patch, given its index among all M P: the loss is

        sum over the M = G B global crops of (mean over the crop's masked patches) / M

    divided by the number of all crops, including those without a mask.
    """
    counts_M = masks_MP.sum(1).clamp(min=1)
    return (1.0 / (counts_M * len(masks_MP)))[hidden_N // masks_MP.shape[1]]


def koleo_loss(tokens_MC: Tensor, crops: int, group: int) -> Tensor:
    """Compute KoLeo, which spreads the class tokens of global crops: -log of the distance to the nearest neighbour.

        sum over crops of  (-1 / B) sum_i log(|x_i - x_nn(i)| + 1e-8),    x of length 1

    The neighbour is searched among the same crop of the `group` images of its group in the global batch. The sum over
    crops is upstream's mean times 2.
    """
    # In float32; upstream uses bf16, whose rounding loses the distances of near neighbours.
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
    policy = policy or ComputePolicy(x_ND.device.type)

    def block_loss(z_RK: Tensor, rows: slice, weights_R: Tensor | None) -> Tensor:
        targets, chosen_RJ = (targets_MK[rows], None) if rows_NJ is None else (targets_MK, rows_NJ[rows])
        function = compiled_once(_cross_entropy) if policy.compiles and weights_R is not None else _cross_entropy
        losses_R: Tensor = function(z_RK, targets, chosen_RJ, weights_R, temperature)
        return losses_R

    return chunked_loss(x_ND, prototypes_KD, weights_N.to(targets_MK.dtype), block_loss, policy)


def _cross_entropy(
    z_RK: Tensor, targets_MK: Tensor, rows_RJ: Tensor | None, weights_R: Tensor | None, temperature: float
) -> Tensor:
    """Return each row's cross entropy from its logits z, with weights overwritten by the weighted sum's gradients."""
    t_RK = targets_MK if rows_RJ is None else _sum_of_targets(targets_MK, rows_RJ)
    y_RK = z_RK.to(targets_MK.dtype) * (LOG2_E / temperature)  # the student's temperature is constant: one graph
    most_R1 = y_RK.amax(1, keepdim=True)
    e_RK = (y_RK - most_R1).exp2()
    sums_R, mass_R, dots_R = e_RK.sum(1), t_RK.sum(1), (t_RK * y_RK).sum(1)
    if weights_R is not None:
        scale_R = weights_R / temperature
        z_RK.copy_(e_RK * (scale_R * mass_R / sums_R)[:, None] - t_RK * scale_R[:, None])
    return (mass_R * (sums_R.log2() + most_R1[:, 0]) - dots_R) / LOG2_E


def _sum_of_targets(targets_MK: Tensor, rows_RJ: Tensor) -> Tensor:
    parts = [torch.where(rows_R[:, None] >= 0, targets_MK[rows_R.clamp(min=0)], 0.0) for rows_R in rows_RJ.unbind(1)]
    return sum(parts[1:], start=parts[0])


@torch.no_grad()
def sinkhorn_targets(
    logits_NK: Tensor, temperature: float, iterations: int = 3, policy: ComputePolicy | None = None
) -> Tensor:
    """Turn logits into targets, float32 at least, whose rows sum to 1. All processes call it, each with its samples.

    The targets overwrite logits that are float32 already, unless the policy compiles.
    """
    policy = policy or ComputePolicy(logits_NK.device.type)
    wide = torch.promote_types(logits_NK.dtype, torch.float32)
    factor = torch.full((), LOG2_E / temperature, dtype=wide, device=logits_NK.device)
    blocks = row_blocks(len(logits_NK), logits_NK.shape[1], policy)

    def fused(function: Callable[..., Tensor], rows: slice, *arguments: Tensor) -> Tensor:
        return (compiled_once(function) if policy.compiles else function)(logits_NK[rows], factor, *arguments)

    # A process whose crops have no mask has no blocks, but takes part in the all-reduces.
    log_sums_K = logits_NK.new_full(logits_NK.shape[1:], -math.inf, dtype=wide)
    for rows in blocks:
        log_sums_K = torch.logaddexp2(log_sums_K, fused(_log_sums, rows))
    most_K = summed(log_sums_K.clone(), dist.ReduceOp.MAX)  # a copy: reduced in place, and needed below
    s_K = -(summed((log_sums_K - most_K).exp2(), dist.ReduceOp.SUM).log2() + most_K)
    for _ in range(iterations - 1):
        mass_K = torch.zeros_like(s_K)
        for rows in blocks:
            mass_K += fused(_masses, rows, s_K)
        # Never log 0: a prototype's entries sum to 1 before each sample is divided by its sum, at most K.
        s_K = s_K - summed(mass_K, dist.ReduceOp.SUM).log2()
    if policy.compiles and blocks:
        return fused(_softmax, blocks[0], s_K)
    targets_NK = logits_NK.to(wide)
    for rows in blocks:
        targets_NK[rows] = fused(_softmax, rows, s_K)
    return targets_NK


def summed(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce over the processes, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x, operation)
    return x


def _log_sums(logits_RK: Tensor, factor: Tensor) -> Tensor:
    """Return log2 sum exp2 over the samples, for each prototype."""
    scaled_RK = logits_RK.to(factor.dtype) * factor
    most_K = scaled_RK.amax(0)
    return (scaled_RK - most_K).exp2().sum(0).log2() + most_K


def _masses(logits_RK: Tensor, factor: Tensor, s_K: Tensor) -> Tensor:
    return _softmax(logits_RK, factor, s_K).sum(0)


def _softmax(logits_RK: Tensor, factor: Tensor, s_K: Tensor) -> Tensor:
    shifted_RK = logits_RK.to(factor.dtype) * factor + s_K  # a 0-dimensional factor would not promote bf16
    e_RK = (shifted_RK - shifted_RK.amax(1, keepdim=True)).exp2()
    return e_RK / e_RK.sum(1, keepdim=True)
