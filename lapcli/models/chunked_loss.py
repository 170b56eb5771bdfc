"""Losses of logits x W^T that never materialise all logits.

The plain computation keeps several N x V float32 matrices from the forward to the backward. Here the rows are
processed in chunks, and since the loss is a weighted sum over the rows, each chunk's gradients are computed in the same
pass: the same three matmuls as the plain loss, with the memory of one chunk. A loss is one function of a block's
logits, which it overwrites with their gradients. torch.compile makes two kernels of it, one for the sums over a row and
one that writes the gradients; uncompiled it runs on blocks that stay in a CPU's cache.

    soft-capped cross entropy     z = c tanh(x W^T / c)          loss_n = log sum_v exp(z_nv) - z_{n, target}

Shapes: N tokens, D width, V vocabulary, R rows of a chunk or block.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lapcli.models.compiling import compiled_once
from lapcli.runtime.devices import ComputePolicy

Reduction = Literal["mean", "sum", "none"]
#: Returns the losses of a block of logits from the block, its rows and their weights; with weights, it overwrites the
#: logits with the gradients of the weighted sum.
BlockLoss = Callable[[Tensor, slice, Tensor | None], Tensor]

# Two chunks fit into the cache of a CPU; a GPU needs large matmuls. With fewer than 256 rows the
# matmuls would be bound by reading the weights.
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**29}
FEWEST_ROWS = 256
# Elements that uncompiled elementwise work processes at once: its temporary tensors stay in the cache.
BLOCK_ELEMENTS = {"cpu": 2**17}
COARSE_BLOCKS = 16  # blocks of a chunk if the policy is coarse
LOG2_E = math.log2(math.e)


def softcapped_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float,
    reduction: Reduction = "mean",
    compiled: bool = False,
    policy: ComputePolicy | None = None,
) -> Tensor:
    """Compute the loss of `softcap * tanh(x @ weight.T / softcap)`, in float32 (float64 for float64 input).

    Args:
        targets_N: Token ids; -1 marks an ignored token.
        reduction: `mean` over the tokens that are not ignored (0 if there are none), `sum`, or `none` for each token's
            loss (0 if ignored), which is for evaluation and has no gradient.
        compiled: Fuse the elementwise work of a chunk with torch.compile.
        policy: Determines the size of chunks; by default that of the device of `x`.
    """
    policy = replace(policy or ComputePolicy(x_ND.device.type), compiles=compiled)
    weights_N = (targets_N >= 0).to(torch.promote_types(x_ND.dtype, torch.float32))

    def block_loss(z_RV: Tensor, rows: slice, weights_R: Tensor | None) -> Tensor:
        function = compiled_once(_softcapped) if compiled and weights_R is not None else _softcapped
        losses_R: Tensor = function(z_RV, targets_N[rows], softcap, weights_R)
        return losses_R

    if reduction == "none":
        with torch.no_grad():
            return chunked_loss(x_ND, weight_VD, weights_N, block_loss, policy)[1] * weights_N
    if reduction == "mean":
        weights_N = weights_N / weights_N.sum().clamp(min=1)  # on the device: the host does not wait for the count
    return chunked_loss(x_ND, weight_VD, weights_N, block_loss, policy)[0]


def _softcapped(z_RV: Tensor, targets_R: Tensor, softcap: float, weights_R: Tensor | None) -> Tensor:
    """Return each row's loss from the plain logits z; see `BlockLoss`.

    With s = sigmoid(2 z / c), tanh(z / c) = 2 s - 1, and the gradient is (softmax - onehot) 4 s (1 - s). Since the
    capped logits are at most c, no maximum has to be subtracted before exp.
    """
    target_R1 = targets_R.clamp(min=0)[:, None]
    # The sigmoid in float32 at least, by exp2, a GPU's single instruction: Inductor would store torch.sigmoid's result
    # instead of computing it again in the second kernel.
    wide, factor = torch.promote_types(z_RV.dtype, torch.float32), -2 / softcap * LOG2_E
    s_RV, s_target_R = (1 / (1 + (z.to(wide) * factor).exp2()) for z in (z_RV, z_RV.gather(1, target_R1)[:, 0]))
    cap = softcap * LOG2_E
    e_RV = (2 * cap * s_RV - cap).exp2()
    sum_R = e_RV.sum(1)
    if weights_R is not None:
        weights_R1 = 4 * weights_R[:, None]
        # A comparison, which fuses with the rest; a scatter would need the matrix in memory.
        is_target_RV = torch.arange(z_RV.shape[1], device=z_RV.device) == target_R1
        gradient_RV = torch.addcmul(torch.where(is_target_RV, -weights_R1, 0.0), e_RV, weights_R1 / sum_R[:, None])
        z_RV.copy_(gradient_RV * torch.addcmul(s_RV, s_RV, s_RV, value=-1))
    return sum_R.log() - softcap * (2 * s_target_R - 1)


def chunked_loss(
    x_ND: Tensor, weight_VD: Tensor, weights_N: Tensor, block_loss: BlockLoss, policy: ComputePolicy
) -> tuple[Tensor, Tensor]:
    """Return sum_n weights_n loss_n, and each loss_n without a gradient. The sum can be differentiated once."""
    each_N: Tensor
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        total, each_N = _ChunkedLoss.apply(x_ND, weight_VD, weights_N, block_loss, policy)
        return total, each_N
    each_N, _ = _in_chunks(x_ND, weight_VD, weights_N, block_loss, policy, needs_gradients=False)
    return (each_N * weights_N).sum(), each_N


def row_blocks(rows: int, width: int, policy: ComputePolicy) -> list[slice]:
    """Return the rows that elementwise work on rows x width logits processes at once: if compiled, all of them."""
    size = rows if policy.compiles else max(1, BLOCK_ELEMENTS.get(policy.device_type, 2**24) // width)
    if policy.coarse:
        size = max(size, -(-rows // COARSE_BLOCKS))
    return [slice(first, min(first + size, rows)) for first in range(0, rows, max(1, size))]


def _in_chunks(
    x_ND: Tensor,
    weight_VD: Tensor,
    weights_N: Tensor,
    block_loss: BlockLoss,
    policy: ComputePolicy,
    needs_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return each row's loss, and the gradients of `x` and the weight, which are empty unless they are needed."""
    wide, vocab = torch.promote_types(x_ND.dtype, torch.float32), len(weight_VD)
    w_VD = weight_VD.to(x_ND.dtype)
    each_N = torch.empty(len(x_ND), dtype=wide, device=x_ND.device)
    dx_ND, dw_VD = (
        (torch.empty_like(x_ND), torch.zeros_like(weight_VD, dtype=wide)) if needs_gradients else (x_ND, w_VD)
    )
    size = max(FEWEST_ROWS, CHUNK_BYTES.get(policy.device_type, 2**26) // x_ND.element_size() // vocab)
    # One buffer for all chunks: fresh pages take longer than the computation in them.
    buffer_RV = torch.empty((min(size, len(x_ND)), vocab), dtype=x_ND.dtype, device=x_ND.device)
    for first in range(0, len(x_ND), size):
        chunk = slice(first, min(first + size, len(x_ND)))
        x_RD = x_ND[chunk]
        z_RV = torch.mm(x_RD, w_VD.t(), out=buffer_RV[: len(x_RD)])
        for block in row_blocks(len(x_RD), vocab, policy):
            rows = slice(chunk.start + block.start, chunk.start + block.stop)
            each_N[rows] = block_loss(z_RV[block], rows, weights_N[rows] if needs_gradients else None)
        if needs_gradients:
            torch.mm(z_RV, w_VD, out=dx_ND[chunk])
            if z_RV.dtype == wide:  # addmm_ takes one dtype; a bf16 product is widened as it is added
                dw_VD.addmm_(z_RV.t(), x_RD)
            else:
                dw_VD += z_RV.t() @ x_RD
    return each_N, (dx_ND, dw_VD.to(weight_VD.dtype))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, weights_N: Tensor, block_loss: BlockLoss, policy: ComputePolicy
    ) -> tuple[Tensor, Tensor]:
        each_N, ctx.gradients = _in_chunks(x_ND, weight_VD, weights_N, block_loss, policy, needs_gradients=True)
        ctx.mark_non_differentiable(each_N)
        return (each_N * weights_N).sum(), each_N

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss can be differentiated once; compute the loss again")
        dx_ND, dw_VD = ctx.gradients
        ctx.gradients = None  # scaled in place below: a copy would cost the memory that this function saves
        return dx_ND.mul_(gradient), dw_VD.mul_(gradient), None, None, None
