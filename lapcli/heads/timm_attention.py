"""Laplacian heads and other operators in timm's vision transformers: `laplacianize(model, laplacian_heads)`.

The attention modules of a built model change their class and get the operators' parameters, if there are any. All
other parameters, state-dict names and hooks stay, so that weights can be exchanged with timm. A layer without operators
keeps timm's own class.

Shapes: B images, T tokens, C channels, H heads, D head size.
"""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from lapcli.heads.operator_attention import HeadOperators
from lapcli.heads.plan import HeadPlan, HeadSpec, head_plan, plan_of_layers

Model = TypeVar("Model", bound=nn.Module)


def laplacianize(model: Model, laplacian_heads: HeadSpec) -> Model:
    """Turn the last heads of each layer of a timm ViT into Laplacian heads, in place, and return the model.

    `laplacian_heads` is a number, a list with one number per layer, `"linear(0, 12)"` or
    `{"layers": "6-11", "heads": 12}`; 0 restores the plain model. Operators by name, `{"exclusive": 4}`, may only use a
    head's values and attention's output. Plain, RoPE and EVA attention are supported; for any other, ValueError names
    the attention classes of the model, and nothing is changed.

    Weights and their names stay, but a Laplacian head computes another function of them: a pretrained model needs
    fine-tuning afterwards.
    """
    layers = attention_layers(model)
    plan = head_plan(laplacian_heads, len(layers), _heads(layers))
    refuse_needs(plan)
    return set_operators(model, plan)


def refuse_needs(plan: HeadPlan) -> None:
    """Refuse operators that need more inputs: other libraries' models only provide values and attention's output."""
    for operator in dict.fromkeys(claim.operator for layer in plan.layers for claim in layer):
        if operator.needs:
            raise ValueError(
                f"{operator.name} needs {' and '.join(sorted(operator.needs))}, which laplacianize does not provide; "
                f"train it with model.operators in a recipe, or use an operator that needs only values and attention"
            )


def set_operators(model: Model, plan: HeadPlan) -> Model:
    """Set the operators of each layer's heads, in place, and initialise the operators' parameters."""
    layers = attention_layers(model)
    for number, module in enumerate(layers):
        plain = _PLAIN.get(type(module), type(module))
        operators = HeadOperators(plan, number, module.proj.in_features // plan.heads, module.proj.in_features)
        module.__class__ = _LAPLACIAN[plain] if operators.claims else plain
        if operators.claims:
            weight = module.proj.weight
            module.operators = operators.to(weight.device)
            if not weight.is_meta:
                operators.initialise()
        elif "operators" in module._modules:  # plain again: without the parameters of operators
            del module.operators
    return model


def head_plan_of(model: nn.Module) -> HeadPlan:
    """Return the current plan of the model's heads."""
    layers = attention_layers(model)
    return plan_of_layers([m.operators.claims if type(m) in _PLAIN else () for m in layers], _heads(layers))


def _heads(layers: list) -> int:
    heads = {module.num_heads for module in layers}
    if len(heads) != 1:
        raise ValueError(f"the layers have different numbers of heads ({sorted(heads)}), which is not supported")
    return int(heads.pop())


def attention_layers(model: nn.Module) -> list:
    """Return the attention of each layer, in order; ValueError if there is none or one is of an unknown class."""
    seen = [module for module in model.modules() if _is_attention(module)]
    unknown = sorted({f"{type(m).__module__}.{type(m).__qualname__}" for m in seen if not _is_known(m)})
    if unknown or not seen:
        known = ", ".join(f"{plain.__module__}.{plain.__qualname__}" for plain in _LAPLACIAN)
        problem = "unsupported attention" if seen else "no attention"
        raise ValueError(f"{type(model).__name__} has {problem}; saw {', '.join(unknown) or 'none'}, expected {known}")
    return seen


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is a layer's attention; by name, so that unknown classes are noticed. Pooling is not."""
    name = type(module).__name__.lower()
    return _is_known(module) or (("attention" in name or "attn" in name) and "pool" not in name)


def _is_known(module: nn.Module) -> bool:
    # Exact types: a subclass may compute something else.
    return type(module) in _LAPLACIAN or type(module) in _PLAIN


class _WithOperators:
    """The part that the three classes share: the operators and the output projection."""

    operators: HeadOperators

    def _attend(self, x_BTC: Tensor, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool) -> Tensor:
        rate = self.attn_drop.p if self.training else 0.0  # type: ignore[attr-defined]
        return self.operators(*qkv, x_BTC=x_BTC, causal=causal, mask=mask, dropout=rate)

    def _project(self, x_BTC: Tensor, y_BHTD: Tensor) -> Tensor:
        """Concatenate the heads, apply timm's optional norm and gate, then the output projection."""
        y_BTC = self.norm(y_BHTD.transpose(1, 2).flatten(2))  # type: ignore[attr-defined]
        if self.gate is not None:  # type: ignore[attr-defined]
            y_BTC = y_BTC * self.gate(x_BTC).sigmoid()  # type: ignore[attr-defined]
        return self.proj_drop(self.proj(y_BTC))  # type: ignore[attr-defined]


class LaplacianAttention(_WithOperators, Attention):
    """timm's plain attention with Laplacian heads."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self._project(x, self._attend(x, queries_keys_values(self, x), attn_mask, is_causal))


class _WithRope(_WithOperators):
    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return self._project(x, self._attend(x, queries_keys_values(self, x, rope), attn_mask, is_causal))


class LaplacianAttentionRope(_WithRope, AttentionRope):
    """timm's rotary attention with Laplacian heads."""


class LaplacianEvaAttention(_WithRope, EvaAttention):
    """timm's EVA attention with Laplacian heads; its keys have no bias."""


def queries_keys_values(module: Any, x_BTC: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of attention, B x H x T x D: normed, rotated, keys and values repeated for each query head."""
    q, k, v = _projected(module, x_BTC)
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        # Tables in float32 widen q and k; SDPA takes one dtype.
        q, k = _rotate(module, q, rope).type_as(v), _rotate(module, k, rope).type_as(v)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return q, k, v


def _projected(module: Any, x_BTC: Tensor) -> tuple[Tensor, ...]:
    if module.qkv is not None:
        # EVA has its biases apart from `qkv`, that of the keys as a buffer of zeros.
        biased = getattr(module, "q_bias", None) is not None
        bias = torch.cat((module.q_bias, module.k_bias, module.v_bias)) if biased else None
        qkv_BTC = F.linear(x_BTC, module.qkv.weight, bias) if biased else module.qkv(x_BTC)
        return qkv_BTC.unflatten(2, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    kv_heads = getattr(module, "num_kv_heads", module.num_heads)
    parts = (module.q_proj, module.num_heads), (module.k_proj, kv_heads), (module.v_proj, kv_heads)
    return tuple(part(x_BTC).unflatten(2, (heads, -1)).transpose(1, 2) for part, heads in parts)


def _rotate(module: Any, x_BHTD: Tensor, rope: Tensor) -> Tensor:
    """Rotate the patches; class and register tokens have no position in the image."""
    prefix = module.num_prefix_tokens
    half = getattr(module, "rotate_half", False)
    return torch.cat([x_BHTD[:, :, :prefix], apply_rot_embed_cat(x_BHTD[:, :, prefix:], rope, half=half)], dim=2)


_LAPLACIAN: dict[type, type] = {
    Attention: LaplacianAttention,
    AttentionRope: LaplacianAttentionRope,
    EvaAttention: LaplacianEvaAttention,
}
_PLAIN = {ours: plain for plain, ours in _LAPLACIAN.items()}
