"""Laplacian heads: the graph Laplacian `I - P` in place of the softmax matrix `P` in some heads of a layer.

Paper: "Laplacian Heads Improve Transformers by Smoothing Token Representations" (equation 3).

    attention head    y_h = P_h v_h          = sdpa(q_h, k_h, v_h)
    Laplacian head    y_h = (I - P_h) v_h    = v_h - sdpa(q_h, k_h, v_h)

The last `laplacian_heads` of the `H` heads are the Laplacian ones. `P` is never built, and no parameter is added.
Rows of `P` sum to one, so whatever is constant over the tokens (a bias of the values, for one) vanishes.

Shapes: B batch, H query heads, G key and value heads (G divides H), T query tokens, S key tokens, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["dense_laplacian_attention", "laplacian_attention"]


def laplacian_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    laplacian_heads: int,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    current_v_BGTD: Tensor | None = None,
    fused: bool = True,
) -> Tensor:
    """Attention whose last `laplacian_heads` heads apply `I - P`; with none it is bit for bit plain attention.

    Args:
        causal: Tokens see themselves and what is before them. With a cache (S > T) the queries are the last T of
            the S tokens.
        mask: Boolean (True: may attend) or additive, broadcast to B, H, T, S; instead of `causal`.
        scale: Of the logits; 1 / sqrt(D) if none is given.
        current_v_BGTD: Values of the query tokens, from which the mean is subtracted. By default the last T of
            the S values, which is right with and without a cache; a padded cache has to pass its own.
        fused: One copy less on the CPU, where the kernel allows it; the output is the same to the bit.
    """
    H, T = q_BHTD.shape[1:3]
    G, S = k_BGSD.shape[1], k_BGSD.shape[2]
    if not 0 <= laplacian_heads <= H:
        raise ValueError(f"{H} heads, so 0 to {H} of them can be Laplacian, got {laplacian_heads}")
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key and value heads evenly")
    if causal and mask is not None:
        raise ValueError("a mask is given instead of causal, not with it")
    if T > S and (causal or (laplacian_heads and current_v_BGTD is None)):
        raise ValueError(f"{T} query tokens cannot be the last of {S} key tokens")
    if causal and S != T:
        # SDPA aligns its causal flag to the first key; with a cache the last query is the last key.
        causal = False
        mask = None if T == 1 else torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).tril(S - T)

    plain = current_v_BGTD is None and mask is None
    if laplacian_heads and fused and plain and _FusedOnCPU.fits(q_BHTD, k_BGSD, v_BGSD):
        return _FusedOnCPU.apply(q_BHTD, k_BGSD, v_BGSD, laplacian_heads, causal, scale)

    mean_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=G != H
    )
    if not laplacian_heads:
        return mean_BHTD
    v_BHTD = _values_of_queries(v_BGSD if current_v_BGTD is None else current_v_BGTD, H, T)
    first = H - laplacian_heads
    difference = v_BHTD[:, first:] - mean_BHTD[:, first:]
    return difference if first == 0 else torch.cat([mean_BHTD[:, :first], difference], dim=1)


def dense_laplacian_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    laplacian_heads: int,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The definition with `P` written out: slow, for reading and for measuring against."""
    H, T, D = q_BHTD.shape[1:]
    G, S = k_BGSD.shape[1], k_BGSD.shape[2]
    k_BHSD, v_BHSD = (x.repeat_interleave(H // G, dim=1) for x in (k_BGSD, v_BGSD))
    logits_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) * (D**-0.5 if scale is None else scale)
    if causal:
        future_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).triu(S - T + 1)
        logits_BHTS = logits_BHTS.masked_fill(future_TS, float("-inf"))
    P_BHTS = logits_BHTS.softmax(dim=-1)
    # The identity of query t stands at its own key, S - T + t.
    I_TS = torch.eye(T, dtype=q_BHTD.dtype, device=q_BHTD.device)
    I_TS = F.pad(I_TS, (S - T, 0))
    first = H - laplacian_heads
    operator = torch.cat([P_BHTS[:, :first], I_TS - P_BHTS[:, first:]], dim=1)
    return operator @ v_BHSD


def _values_of_queries(v_BGSD: Tensor, heads: int, tokens: int) -> Tensor:
    current = v_BGSD[:, :, v_BGSD.shape[2] - tokens :]
    groups = current.shape[1]
    return current if groups == heads else current.repeat_interleave(heads // groups, dim=1)


class _FusedOnCPU(torch.autograd.Function):
    """The same with one buffer less: the kernel's output becomes `y` in place.

    The flash kernel saves its output for the backward, so `v - out` would hold a second copy of it until then.
    Here only `y` is kept, and the backward recovers `out` as `v - y`. The backward is linear in the gradient of
    `out`, which is `-dy` in a Laplacian head: it runs on `dy`, and its results change their sign in place.
    """

    @staticmethod
    def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
        """What SDPA asks before it takes this kernel: one shape and dtype, dense channels, at least one token.

        Compiled code does not need it: the partitioner recomputes `v - out` by itself.
        """
        return (
            q.device.type == "cpu"
            and q.dtype in (torch.float32, torch.bfloat16)
            and q.dtype == k.dtype == v.dtype
            and q.shape == k.shape == v.shape
            and q.numel() > 0
            and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
            and not torch.compiler.is_compiling()
        )

    @staticmethod
    def forward(ctx, q, k, v, laplacian_heads, causal, scale):  # type: ignore[no-untyped-def]
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        first = q.shape[1] - laplacian_heads
        _subtract_from(v, out, first)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.first, ctx.causal, ctx.scale = first, causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        q, k, v, y, logsumexp = ctx.saved_tensors
        # Once the output projection is done with `y` nobody else holds it, and it can turn into `out` and back.
        ours_alone = _is_only_held_here(y)
        out = y.data if ours_alone else y.clone()  # .data: it is y again before autograd can look at its version
        _subtract_from(v, out, ctx.first)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, out, logsumexp, 0.0, ctx.causal, scale=ctx.scale
        )
        if ours_alone:
            _subtract_from(v, out, ctx.first)
        dq[:, ctx.first :].neg_()
        dk[:, ctx.first :].neg_()
        _subtract_from(dy, dv, ctx.first)
        return dq, dk, dv, None, None, None


def _subtract_from(minuend_BHTD: Tensor, x_BHTD: Tensor, first: int) -> None:
    """x <- minuend - x in the heads from `first` on, in place."""
    torch.sub(minuend_BHTD[:, first:], x_BHTD[:, first:], out=x_BHTD[:, first:])


def _is_only_held_here(saved: Tensor) -> bool:
    """No tensor shares the storage beyond the saved one, its unpacked twin and the handle we ask through."""
    return torch._C._storage_Use_Count(saved.untyped_storage()._cdata) <= 3
