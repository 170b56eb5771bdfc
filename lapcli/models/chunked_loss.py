"""Cross entropy of soft-capped logits that never holds all logits.

    z = c tanh(x W^T / c)          loss_n = log sum_v exp(z_nv) - z_{n, target}

The plain way keeps several N x V float32 matrices from the forward to the backward. Here the rows go through in
chunks, and since the loss is a scalar each chunk's gradients are taken on the spot, in the same pass:

    dloss/dlogit = (softmax(z) - onehot) (1 - (z/c)^2)

so the work is the plain loss's three matrix products and the memory is two chunks. |z| <= c, so exp needs no maximum
subtracted.

Shapes: N tokens, D width, V vocabulary, R rows of a chunk.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]

#: Beyond this exp(z) of a large vocabulary would leave float32.
LARGEST_SOFTCAP = 50.0

# Elements of a chunk: two of them fit the cache of a CPU; a GPU wants large matrix products. The matrix products of
# fewer rows than 256 would wait for the weights.
_CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
_FEWEST_ROWS = 256


def softcapped_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    softcap: float,
    reduction: Reduction = "mean",
    compiled: bool = False,
) -> Tensor:
    """The loss of `softcap * tanh(x @ weight.T / softcap)`, in float32 (float64 for float64 input).

    Args:
        targets_N: Ids; -1 marks a token that does not count.
        reduction: `mean` over the tokens that count (0 if there are none), `sum`, or `none` for each token's loss
            (0 where it does not count), which is for evaluation and has no gradient.
        compiled: Fuse the elementwise work of a chunk with torch.compile.
    """
    if reduction == "none":
        with torch.no_grad():
            return _each(x_ND, weight_VD, targets_N, softcap)
    scale = torch.ones((), dtype=_accumulation_dtype(x_ND), device=x_ND.device)
    if reduction == "mean":
        scale = scale / (targets_N >= 0).sum().clamp(min=1)
    if not (torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)):
        return _each(x_ND, weight_VD, targets_N, softcap).sum() * scale
    total: Tensor = _ChunkedLoss.apply(x_ND, weight_VD, targets_N, softcap, scale, compiled)
    return total


def _chunks(x_ND: Tensor, vocab: int) -> list[slice]:
    elements = _CHUNK_ELEMENTS.get(x_ND.device.type, 2**24)
    rows = max(_FEWEST_ROWS, elements // vocab)
    return [slice(i, min(i + rows, len(x_ND))) for i in range(0, len(x_ND), rows)]


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _each(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float) -> Tensor:
    weight_VD = weight_VD.to(x_ND.dtype)
    losses_N = torch.empty(len(x_ND), dtype=_accumulation_dtype(x_ND), device=x_ND.device)
    for rows in _chunks(x_ND, len(weight_VD)):
        z_RV = F.linear(x_ND[rows], weight_VD).to(losses_N.dtype).div_(softcap).tanh_().mul_(softcap)
        target_R1 = targets_N[rows].clamp(min=0)[:, None]
        z_target_R = z_RV.gather(1, target_R1)[:, 0]
        losses_N[rows] = z_RV.exp_().sum(1).log_().sub_(z_target_R).masked_fill_(targets_N[rows] < 0, 0.0)
    return losses_N


def _losses_and_gradients(
    t_RV: Tensor, e_RV: Tensor, targets_R: Tensor, softcap: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """From logits / softcap in `t` (overwritten; `e` is scratch): each row's loss, and dloss/dlogits times `scale`."""
    t_RV.tanh_()
    counts_R = targets_R >= 0
    target_R1 = targets_R.clamp(min=0)[:, None]
    z_target_R = t_RV.gather(1, target_R1)[:, 0] * softcap
    torch.mul(t_RV, softcap, out=e_RV).exp_()
    sum_R = e_RV.sum(1)
    losses_R = torch.where(counts_R, sum_R.log() - z_target_R, 0.0)
    weight_R = torch.where(counts_R, scale, 0.0).to(t_RV.dtype)
    e_RV.mul_((weight_R / sum_R)[:, None])
    e_RV.scatter_add_(1, target_R1, -weight_R[:, None])
    t_RV.mul_(t_RV)
    return losses_R, e_RV.addcmul_(e_RV, t_RV, value=-1)


def _losses_and_gradients_fused(
    t_RV: Tensor, e_RV: Tensor, targets_R: Tensor, softcap: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The same written without in-place steps, which the compiler turns into two loops over the chunk."""
    t_RV = t_RV.tanh()
    counts_R = targets_R >= 0
    target_R1 = targets_R.clamp(min=0)[:, None]
    z_target_R = t_RV.gather(1, target_R1)[:, 0] * softcap
    sum_R = (t_RV * softcap).exp().sum(1)
    losses_R = torch.where(counts_R, sum_R.log() - z_target_R, 0.0)
    weight_R = torch.where(counts_R, scale, 0.0).to(t_RV.dtype)
    ids_V = torch.arange(t_RV.shape[1], device=t_RV.device)
    onehot_RV = (ids_V == target_R1).to(t_RV.dtype)
    softmax_RV = (t_RV * softcap).exp() / sum_R[:, None]
    return losses_R, (softmax_RV - onehot_RV) * (1 - t_RV * t_RV) * weight_R[:, None]


_compiled: Callable[..., tuple[Tensor, Tensor]] | None = None


def _compiled_losses_and_gradients() -> Callable[..., tuple[Tensor, Tensor]]:
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(_losses_and_gradients_fused, dynamic=False)
    return _compiled


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float, scale: Tensor, compiled: bool
    ) -> Tensor:
        dtype = _accumulation_dtype(x_ND)
        same = x_ND.dtype == dtype
        w_VD = weight_VD.to(x_ND.dtype)
        dx_ND = torch.empty_like(x_ND)
        dw_VD = torch.zeros_like(weight_VD, dtype=dtype)
        total = torch.zeros((), dtype=dtype, device=x_ND.device)
        step = _compiled_losses_and_gradients() if compiled else _losses_and_gradients
        chunks = _chunks(x_ND, len(w_VD))
        size = (chunks[0].stop, len(w_VD)) if chunks else (0, 0)
        buffer_RV, scratch_RV = (torch.empty(size, dtype=dtype, device=x_ND.device) for _ in range(2))
        for rows in chunks:
            x_RD = x_ND[rows]
            t_RV, e_RV = buffer_RV[: len(x_RD)], scratch_RV[: len(x_RD)]
            if same:  # the division by the cap rides on the matrix product
                torch.addmm(t_RV, x_RD, w_VD.t(), beta=0, alpha=1 / softcap, out=t_RV)
            else:
                t_RV.copy_(F.linear(x_RD, w_VD)).div_(softcap)
            losses_R, dlogits_RV = step(t_RV, e_RV, targets_N[rows], softcap, scale)
            total += losses_R.sum()
            dlogits_RV = dlogits_RV.to(x_ND.dtype)
            torch.mm(dlogits_RV, w_VD, out=dx_ND[rows])
            if same:
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
        ctx.gradients = None  # scaled in place: a copy would cost the memory this saves
        return dx_ND.mul_(gradient), dw_VD.mul_(gradient), None, None, None, None
