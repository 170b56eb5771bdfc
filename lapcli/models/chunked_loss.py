"""Cross entropy of soft-capped logits that never materialises all logits.

    z = c tanh(x W^T / c)          loss_n = log sum_v exp(z_nv) - z_{n, target}

The plain computation keeps several N x V float32 matrices from the forward to the backward. Here the rows are
processed in chunks, and since the loss is a scalar each chunk's gradients are computed in the same pass:

    dloss/dlogit = (softmax(z) - onehot) (1 - (z/c)^2)

so it takes the same three matrix products as the plain loss, and the memory of one chunk. Since |z| <= c, no maximum
has to be subtracted before exp.

Shapes: N tokens, D width, V vocabulary, R rows of a chunk.
"""

import math
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lapcli.models.compiling import compiled_once
from lapcli.runtime.devices import ComputePolicy

Reduction = Literal["mean", "sum", "none"]

#: Beyond this the sum of exp(z) over a large vocabulary would overflow float32.
LARGEST_SOFTCAP = 50.0

# Elements of a chunk: two chunks fit into the cache of a CPU; a GPU needs large matrix products. With fewer than 256
# rows the matrix products would be bound by reading the weights.
_CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
_FEWEST_ROWS = 256
# Bytes of a compiled chunk, which needs no other memory than its logits: half a gigabyte on CUDA, as uncompiled.
_COMPILED_CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**29}
# Elements of a chunk that the elementwise work processes at once, so that they stay in the cache.
_BLOCK_ELEMENTS = {"cpu": 2**19}
COARSE_BLOCKS = 8  # blocks of a chunk if the policy is coarse


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
        compiled: Fuse the elementwise work of a chunk with torch.compile. Logits are then stored in the dtype of `x`
            and overwritten by their gradients: memory traffic is 6 bytes per logit for bf16, 12 for float32.
        policy: Determines the size of chunks; by default that of the device of `x`.
    """
    device_type = x_ND.device.type if policy is None else policy.device_type
    blocks = COARSE_BLOCKS if policy is not None and policy.coarse else None
    if reduction == "none":
        with torch.no_grad():
            return _each(x_ND, weight_VD, targets_N, softcap, device_type)
    scale = torch.ones((), dtype=_accumulation_dtype(x_ND), device=x_ND.device)
    if reduction == "mean":
        scale = scale / (targets_N >= 0).sum().clamp(min=1)  # on the device: the host does not wait for the count
    if not (torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)):
        return _each(x_ND, weight_VD, targets_N, softcap, device_type).sum() * scale
    total: Tensor = _ChunkedLoss.apply(x_ND, weight_VD, targets_N, softcap, scale, compiled, device_type, blocks)
    return total


def _chunks(x_ND: Tensor, vocab: int, device_type: str, compiled: bool = False) -> list[slice]:
    elements = _CHUNK_ELEMENTS.get(device_type, 2**24)
    if compiled:
        elements = _COMPILED_CHUNK_BYTES.get(device_type, 2**26) // x_ND.element_size()
    rows = max(_FEWEST_ROWS, elements // vocab)
    return [slice(i, min(i + rows, len(x_ND))) for i in range(0, len(x_ND), rows)]


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _buffer(chunks: list[slice], x_ND: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Allocate one buffer for all chunks: fresh pages cost more time than the computation in them."""
    rows = chunks[0].stop if chunks else 0
    return torch.empty((rows, vocab), dtype=dtype, device=x_ND.device)


def _scaled_logits(x_RD: Tensor, weight_VD: Tensor, factor: float, buffer_RV: Tensor) -> Tensor:
    """Compute factor * x @ weight.T into the buffer."""
    out_RV = buffer_RV[: len(x_RD)]
    if x_RD.dtype == out_RV.dtype:  # the matrix product applies the factor for free
        return torch.addmm(out_RV, x_RD, weight_VD.t(), beta=0, alpha=factor, out=out_RV)
    return out_RV.copy_(F.linear(x_RD, weight_VD)).mul_(factor)


def _each(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float, device_type: str) -> Tensor:
    weight_VD = weight_VD.to(x_ND.dtype)
    losses_N = torch.empty(len(x_ND), dtype=_accumulation_dtype(x_ND), device=x_ND.device)
    chunks = _chunks(x_ND, len(weight_VD), device_type)
    buffer_RV = _buffer(chunks, x_ND, len(weight_VD), losses_N.dtype)
    for rows in chunks:
        z_RV = _scaled_logits(x_ND[rows], weight_VD, 1 / softcap, buffer_RV).tanh_().mul_(softcap)
        target_R1 = targets_N[rows].clamp(min=0)[:, None]
        z_target_R = z_RV.gather(1, target_R1)[:, 0]
        losses_N[rows] = z_RV.exp_().sum(1).log_().sub_(z_target_R).masked_fill_(targets_N[rows] < 0, 0.0)
    return losses_N


def _losses_and_gradients(
    u_RV: Tensor,
    targets_R: Tensor,
    softcap: float,
    scale: Tensor,
    device_type: str = "cpu",
    blocks: int | None = None,
) -> Tensor:
    """Return each row's loss from u = 2 logits / softcap; `u` is overwritten with dloss/dlogits times `scale`.

    It processes a few rows at a time, which stay in the cache. With s = sigmoid(u), tanh(u/2) = 2 s - 1 and
    1 - tanh(u/2)^2 = 4 s (1 - s): sigmoid and exp2 take a third of the time of tanh and half of that of exp.
    """
    losses_R = u_RV.new_empty(len(u_RV))
    size = max(1, _BLOCK_ELEMENTS.get(device_type, u_RV.numel()) // u_RV.shape[1])
    if blocks is not None:
        size = -(-len(u_RV) // blocks)
    s_RV = u_RV.new_empty(min(size, len(u_RV)), u_RV.shape[1])
    # z = softcap (2 s - 1), so exp(z) = exp2(2 cap s - cap) with the cap converted to base 2.
    cap = softcap * math.log2(math.e)
    minus_cap = u_RV.new_full((), -cap)
    for first in range(0, len(u_RV), size):
        rows = slice(first, first + size)
        e = u_RV[rows]  # a view, in which exp(z) and then the gradients replace u
        targets = targets_R[rows]
        counts, target_1 = targets >= 0, targets.clamp(min=0)[:, None]
        s = torch.sigmoid(e, out=s_RV[: len(e)])
        z_target = softcap * (2 * s.gather(1, target_1)[:, 0] - 1)
        torch.add(minus_cap, s, alpha=2 * cap, out=e).exp2_()
        sums = e.sum(1)
        losses_R[rows] = torch.where(counts, sums.log() - z_target, 0.0)
        weight = torch.where(counts, 4 * scale, 0.0)  # the 4 of 4 s (1 - s), whose s (1 - s) follows below
        # An ignored row has a weight of 0, so that its clamped target gets no gradient.
        e.mul_((weight / sums)[:, None]).scatter_add_(1, target_1, -weight[:, None])
        e.mul_(s.addcmul_(s, s, value=-1))
    return losses_R


def _losses_and_gradients_fused(z_RV: Tensor, targets_R: Tensor, softcap: float, scale: Tensor) -> Tensor:
    """Return each row's loss from the plain logits z, which are overwritten with their gradients.

    Without in-place steps the compiler makes two kernels of it: one for the sums, and one that reads the logits again
    and writes the gradients over them. No other matrix is in memory.
    """
    s_RV, s_target_R = (_sigmoid(x, 2 / softcap) for x in (z_RV, _picked(z_RV, targets_R)))
    cap = softcap * math.log2(math.e)
    e_RV = (2 * cap * s_RV - cap).exp2()
    sum_R = e_RV.sum(1)
    counts_R = targets_R >= 0
    weight_R1 = torch.where(counts_R, 4 * scale, 0.0)[:, None]
    # A comparison, which fuses with the rest; a scatter would need the matrix in memory.
    is_target_RV = torch.arange(z_RV.shape[1], device=z_RV.device) == targets_R[:, None]
    gradient_RV = e_RV * (weight_R1 / sum_R[:, None]) - torch.where(is_target_RV, weight_R1, 0.0)
    z_RV.copy_(gradient_RV * (s_RV - s_RV * s_RV))
    return torch.where(counts_R, sum_R.log() - softcap * (2 * s_target_R - 1), 0.0)


def _sigmoid(x: Tensor, factor: float) -> Tensor:
    """Compute sigmoid(factor x) in float32 at least, by exp2, which is a single instruction of a GPU."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return 1 / (1 + (wide * (-factor * math.log2(math.e))).exp2())


def _picked(z_RV: Tensor, targets_R: Tensor) -> Tensor:
    return z_RV.gather(1, targets_R.clamp(min=0)[:, None])[:, 0]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softcap: float,
        scale: Tensor,
        compiled: bool,
        device_type: str,
        blocks: int | None,
    ) -> Tensor:
        dtype = _accumulation_dtype(x_ND)
        is_same_dtype = x_ND.dtype == dtype
        w_VD = weight_VD.to(x_ND.dtype)
        dx_ND = torch.empty_like(x_ND)
        dw_VD = torch.zeros_like(weight_VD, dtype=dtype)  # summed over the chunks in float32, also for bf16 products
        total = torch.zeros((), dtype=dtype, device=x_ND.device)
        plain = partial(_losses_and_gradients, device_type=device_type, blocks=blocks)
        chunks = _chunks(x_ND, len(w_VD), device_type, compiled)
        buffer_RV = _buffer(chunks, x_ND, len(w_VD), x_ND.dtype if compiled else dtype)
        for rows in chunks:
            x_RD = x_ND[rows]
            if compiled:
                dlogits_RV = torch.mm(x_RD, w_VD.t(), out=buffer_RV[: len(x_RD)])
                losses_R = compiled_once(_losses_and_gradients_fused)(dlogits_RV, targets_N[rows], softcap, scale)
            else:
                u_RV = _scaled_logits(x_RD, w_VD, 2 / softcap, buffer_RV)
                losses_R = plain(u_RV, targets_N[rows], softcap, scale)
                dlogits_RV = u_RV.to(x_ND.dtype)
            total += losses_R.sum()
            torch.mm(dlogits_RV, w_VD, out=dx_ND[rows])
            if is_same_dtype:
                dw_VD.addmm_(dlogits_RV.t(), x_RD)
            else:
                dw_VD += dlogits_RV.t() @ x_RD
        ctx.gradients = dx_ND, dw_VD.to(weight_VD.dtype)
        return total * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss can be differentiated once; compute the loss again")
        dx_ND, dw_VD = ctx.gradients
        ctx.gradients = None  # scaled in place below: a copy would cost the memory that this function saves
        return dx_ND.mul_(gradient), dw_VD.mul_(gradient), None, None, None, None, None, None
