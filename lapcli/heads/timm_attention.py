"""Laplacian heads in timm's vision transformers: `laplacianize(model, laplacian_heads)`.

The attention modules of a built model change their class and nothing else: parameters, state-dict names and hooks stay,
so that weights move freely between timm and here. A layer without Laplacian heads keeps timm's own class.

Shapes: B images, T tokens, C channels, H heads, D head size.
"""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from lapcli.heads.laplacian import laplacian_attention
from lapcli.heads.plan import HeadPlan, HeadSpec, head_plan

Model = TypeVar("Model", bound=nn.Module)


def laplacianize(model: Model, laplacian_heads: HeadSpec) -> Model:
    """Turns the last heads of each layer of a timm ViT into Laplacian heads, in place, and returns the model.

    `laplacian_heads` is a number, a list with one number a layer, `"linear(0, 12)"` or
    `{"layers": "6-11", "heads": 12}`; 0 gives back the plain model. Plain, RoPE and EVA attention are known; anything
    else is refused with the attention classes that were seen, and nothing is changed.

    Weights and their names stay as they are, but a Laplacian head computes something else from them: a pretrained
    model needs fine-tuning afterwards.
    """
    layers = attention_layers(model)
    heads = {module.num_heads for module in layers}
    if len(heads) != 1:
        raise ValueError(f"the layers have different numbers of heads ({sorted(heads)}), which is not supported")
    plan = head_plan(laplacian_heads, len(layers), heads.pop())
    for module, k in zip(layers, plan.per_layer, strict=True):
        plain = _PLAIN.get(type(module), type(module))
        module.__class__ = _LAPLACIAN[plain] if k else plain
        module.laplacian_heads = k
    return model


def head_plan_of(model: nn.Module) -> HeadPlan:
    """How many heads of each layer are Laplacian now."""
    layers = attention_layers(model)
    return HeadPlan(tuple(getattr(module, "laplacian_heads", 0) for module in layers), layers[0].num_heads)


def attention_layers(model: nn.Module) -> list:
    """The attention of each layer, in order; ValueError if there is none or one is of a kind not known here."""
    seen = [module for module in model.modules() if _is_attention(module)]
    unknown = sorted({f"{type(m).__module__}.{type(m).__qualname__}" for m in seen if not _is_known(m)})
    if unknown or not seen:
        known = ", ".join(f"{plain.__module__}.{plain.__qualname__}" for plain in _LAPLACIAN)
        problem = "attention that cannot be turned" if seen else "no attention"
        raise ValueError(f"{type(model).__name__} has {problem}; saw {', '.join(unknown) or 'none'}, expected {known}")
    return seen


def _is_attention(module: nn.Module) -> bool:
    """By name, so that kinds we do not know are noticed; pooling by attention is no layer's attention."""
    name = type(module).__name__.lower()
    return _is_known(module) or (("attention" in name or "attn" in name) and "pool" not in name)


def _is_known(module: nn.Module) -> bool:
    return type(module) in _LAPLACIAN or type(module) in _PLAIN


class _LaplacianHeads:
    """What the three classes share: the operator and the way out."""

    laplacian_heads: int

    def _attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        rate = self.attn_drop.p if self.training else 0.0  # type: ignore[attr-defined]
        if rate == 0:
            return laplacian_attention(q_BHTD, k_BHTD, v_BHTD, self.laplacian_heads, causal=causal, mask=mask)
        # With dropout on the matrix: v - dropout(P) v.
        mean_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, mask, rate, causal)
        first = q_BHTD.shape[1] - self.laplacian_heads
        return torch.cat([mean_BHTD[:, :first], v_BHTD[:, first:] - mean_BHTD[:, first:]], dim=1)

    def _project(self, x_BTC: Tensor, y_BHTD: Tensor) -> Tensor:
        """Heads side by side, timm's optional norm and gate, then the output projection."""
        y_BTC = self.norm(y_BHTD.transpose(1, 2).flatten(2))  # type: ignore[attr-defined]
        if self.gate is not None:  # type: ignore[attr-defined]
            y_BTC = y_BTC * self.gate(x_BTC).sigmoid()  # type: ignore[attr-defined]
        return self.proj_drop(self.proj(y_BTC))  # type: ignore[attr-defined]


class LaplacianAttention(_LaplacianHeads, Attention):
    """timm's plain attention with Laplacian heads."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self._project(x, self._attend(*queries_keys_values(self, x), attn_mask, is_causal))


class _WithRope(_LaplacianHeads):
    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self._project(x, self._attend(*queries_keys_values(self, x, rope), attn_mask, is_causal))


class LaplacianAttentionRope(_WithRope, AttentionRope):
    """timm's rotary attention with Laplacian heads."""


class LaplacianEvaAttention(_WithRope, EvaAttention):
    """timm's EVA attention with Laplacian heads; its keys have no bias."""


def queries_keys_values(module: Any, x_BTC: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What enters the softmax of any attention known here, B x H x T x D: normed, rotated, a key for each head."""
    q, k, v = _projected(module, x_BTC)
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        q, k = _rotate(module, q, rope).type_as(v), _rotate(module, k, rope).type_as(v)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return q, k, v


def _projected(module: Any, x_BTC: Tensor) -> tuple[Tensor, ...]:
    if module.qkv is not None:
        biased = getattr(module, "q_bias", None) is not None
        bias = torch.cat((module.q_bias, module.k_bias, module.v_bias)) if biased else None
        qkv_BTC = F.linear(x_BTC, module.qkv.weight, bias) if biased else module.qkv(x_BTC)
        return qkv_BTC.unflatten(2, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    kv_heads = getattr(module, "num_kv_heads", module.num_heads)
    parts = (module.q_proj, module.num_heads), (module.k_proj, kv_heads), (module.v_proj, kv_heads)
    return tuple(part(x_BTC).unflatten(2, (heads, -1)).transpose(1, 2) for part, heads in parts)


def _rotate(module: Any, x_BHTD: Tensor, rope: Tensor) -> Tensor:
    """Class and register tokens have no place in the image and are not rotated."""
    prefix = module.num_prefix_tokens
    half = getattr(module, "rotate_half", False)
    return torch.cat([x_BHTD[:, :, :prefix], apply_rot_embed_cat(x_BHTD[:, :, prefix:], rope, half=half)], dim=2)


_LAPLACIAN: dict[type, type] = {
    Attention: LaplacianAttention,
    AttentionRope: LaplacianAttentionRope,
    EvaAttention: LaplacianEvaAttention,
}
_PLAIN = {ours: plain for plain, ours in _LAPLACIAN.items()}
