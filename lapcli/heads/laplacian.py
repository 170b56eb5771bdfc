"""Laplacian heads: the graph Laplacian `I - P` in place of the softmax matrix `P` in some heads of a layer.

Paper: "Laplacian Heads Improve Transformers by Smoothing Token Representations" (equation 3).

    attention head    y_h = P_h v_h          = sdpa(q_h, k_h, v_h)
    Laplacian head    y_h = (I - P_h) v_h    = v_h - sdpa(q_h, k_h, v_h)

The last `laplacian_heads` of the `H` heads are the Laplacian ones. `P` is never built, and no parameter is added.
Rows of `P` sum to one, so everything constant over the tokens (such as a bias of the values) vanishes.

Shapes: B batch, H query heads, G key and value heads (G divides H), T query tokens, S key tokens, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
) -> Tensor:
    """Compute attention whose last `laplacian_heads` heads apply `I - P`; with 0 it is bitwise plain attention.

    Args:
        causal: Tokens attend to themselves and to those before them. With a cache (S > T) the queries are the last T of
            the S tokens.
        mask: Boolean (True: may attend) or additive, broadcast to B, H, T, S; instead of `causal`.
        scale: Factor of the logits; 1 / sqrt(D) by default.
        current_v_BGTD: Values of the query tokens, from which the mean is subtracted. By default the last T of
            the S values, which is right with and without a cache; a padded cache has to pass its own.
    """
    H, T = q_BHTD.shape[1:3]
    G, S = k_BGSD.shape[1], k_BGSD.shape[2]
    if not 0 <= laplacian_heads <= H:
        raise ValueError(f"{H} heads, so 0 to {H} of them can be Laplacian, got {laplacian_heads}")
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key and value heads evenly")
    if causal and mask is not None:
        raise ValueError("give either a mask or causal, not both")
    if T > S and (causal or (laplacian_heads and current_v_BGTD is None)):
        raise ValueError(f"{T} query tokens cannot be the last of {S} key tokens")
    if causal and S != T:
        # SDPA aligns its causal flag to the first key; with a cache the last query is the last key.
        causal = False
        # A single query is the last key and sees all of them, without a mask.
        mask = None if T == 1 else torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).tril(S - T)

    # Taken before SDPA, so that the backward pads this gradient to all heads after SDPA's backward, which is the peak.
    v_BHTD = _laplacian_values(v_BGSD[:, :, S - T :] if current_v_BGTD is None else current_v_BGTD, H, laplacian_heads)
    mean_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=G != H
    )
    if not laplacian_heads:
        return mean_BHTD
    y_BHTD = mean_BHTD.clone()  # SDPA's backward needs the unchanged mean
    y_BHTD[:, H - laplacian_heads :].neg_().add_(v_BHTD)
    return y_BHTD


def _laplacian_values(v_BGTD: Tensor, heads: int, laplacian_heads: int) -> Tensor:
    """Return the values of the last heads, repeated if query heads share them."""
    groups = v_BGTD.shape[1]
    # Head h has the values h // (H / G), as SDPA's enable_gqa assigns them.
    v_BHTD = v_BGTD if groups == heads else v_BGTD.repeat_interleave(heads // groups, dim=1)
    return v_BHTD[:, heads - laplacian_heads :]
