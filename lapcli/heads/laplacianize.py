"""Laplacian heads and other operators in timm and transformers models: `laplacianize(model, laplacian_heads)`.

The attention modules of a built model change their class, and timm's get the operators' parameters, if there are any.
All other parameters, state-dict names and hooks are kept, so that weights can be exchanged with the library. A layer
without operators keeps its own class.

With a cache, a Laplacian head subtracts from the values of the *current* tokens, which are selected before the cache is
updated: the last rows of a static cache are not the current tokens. The subtraction is outside of transformers'
attention function, so that sdpa, eager, flash and flex attention all work.

The weights of a converted model would load into a plain one without an error, and compute nonsense. So
`save_pretrained` names them `model.laplacian.safetensors` (the variant `laplacian`): a plain `from_pretrained` fails,
and `load_laplacian` restores the plan of the config.

Shapes: B batch, T tokens, C channels, H heads, G key and value heads, S tokens in the cache, D head size.
"""

import inspect
import json
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from lapcli.heads.laplacian import HeadOperators
from lapcli.heads.plan import HeadPlan, HeadSpec, head_plan, plan_of_layers

if TYPE_CHECKING:
    from pathlib import Path

Model = TypeVar("Model", bound=nn.Module)
VARIANT = "laplacian"


def laplacianize(model: Model, laplacian_heads: HeadSpec) -> Model:
    """Turn the last heads of each layer into Laplacian heads, in place, and return the model.

    `laplacian_heads` is a number, a list with one number per layer, `"linear(0, 12)"` or
    `{"layers": "6-11", "heads": 12}`; 0 restores the plain model. Operators by name, `{"exclusive": 4}`, may only use a
    head's values and attention's output, and have no parameters in a model of transformers. Supported are timm's plain,
    RoPE and EVA attention and the llama, qwen3, gpt2, nanochat and vit families of transformers; for any other,
    ValueError names the attention classes of the model, and nothing is changed.

    Weights and their names are kept, but a Laplacian head computes another function of them: a pretrained model needs
    fine-tuning afterwards.
    """
    # By name: timm models must not import transformers.
    if not isinstance(model, nn.Module):
        raise TypeError(f"laplacianize takes a model, got {type(model).__name__}; build the model first")
    is_of_transformers = any(each.__module__.startswith("transformers.") for each in type(model).__mro__)
    layers = _transformers_layers(model) if is_of_transformers else attention_layers(model)
    config: Any = getattr(model, "config", None)
    plan = head_plan(laplacian_heads, len(layers), config.num_attention_heads if is_of_transformers else _heads(layers))
    for operator in dict.fromkeys(claim.operator for layer in plan.layers for claim in layer):
        if operator.needs:  # the models only provide values and attention's output
            raise ValueError(
                f"{operator.name} needs {' and '.join(sorted(operator.needs))}, which laplacianize does not provide; "
                "train it with model.operators in a recipe, or use an operator that needs only values and attention"
            )
        if is_of_transformers and operator.adds_parameters:
            raise ValueError(
                f"{operator.name} learns parameters, which from_pretrained would drop when the model is loaded again; "
                "use constants without `learn`, or train it with model.operators in a recipe"
            )
    if not is_of_transformers:
        return set_operators(model, plan)
    for number, module in enumerate(layers):
        plain = _plain(type(module))
        operators = HeadOperators(plan, number, 1, 1)  # the sizes do not matter without parameters
        module.__class__ = _laplacian(plain) if operators.claims else plain
        object.__setattr__(module, "operators", operators)  # not as a submodule, so that nothing of it is saved
    plain_model = _plain(type(model))
    model.__class__ = plain_model if plan.is_plain else _saved_with_plan(plain_model)
    # Operators as text: transformers sorts the keys of config.json, and the order of operators counts.
    config.laplacian_heads = list(plan.per_layer) if plan.is_laplacian else str(plan)
    return model


def load_laplacian(kind: type, folder: "str | Path", **options: Any) -> Any:
    """Load a saved laplacianized model; `kind` is its class, or one of transformers' Auto classes."""
    model = kind.from_pretrained(folder, variant=VARIANT, **options)  # type: ignore[attr-defined]
    plan = getattr(model.config, "laplacian_heads", None)
    if plan is None:
        raise ValueError(
            f"{folder} has no laplacian_heads in its config.json; it was not saved by a laplacianized model"
        )
    return laplacianize(model, json.loads(plan) if isinstance(plan, str) else plan)


def set_operators(model: Model, plan: HeadPlan) -> Model:
    """Set the operators of each layer's heads, in place, and initialise the operators' parameters."""
    for number, module in enumerate(attention_layers(model)):
        if getattr(module, "attn_drop", None) and module.attn_drop.p:
            raise ValueError("attention dropout has no form for head operators; build the model with attn_drop_rate=0")
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
    """Return the attention of each layer, in order; ValueError without attention or for an unknown class."""
    # By name, so that unknown classes are noticed. Pooling is not a layer's attention.
    named = [(type(module).__name__.lower(), module) for module in model.modules()]
    seen = [m for name, m in named if ("attention" in name or "attn" in name) and "pool" not in name]
    # Exact types: a subclass may compute something else.
    unknown = [module for module in seen if type(module) not in {**_LAPLACIAN, **_PLAIN}]
    _refuse_unknown(model, seen, unknown, [_name(plain) for plain in _LAPLACIAN])
    return seen


def _refuse_unknown(model: nn.Module, seen: list, unknown: list, known: list[str]) -> None:
    if unknown or not seen:
        names = ", ".join(sorted({_name(type(module)) for module in unknown})) or "none"
        problem = "unsupported attention" if seen else "no attention"
        raise ValueError(f"{type(model).__name__} has {problem}; saw {names}, expected {', '.join(known)}")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _WithOperators:
    """The common part of the three classes: the operators and the output projection."""

    operators: HeadOperators

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        y_BHTD = self.operators(*queries_keys_values(self, x, rope), x_BTC=x, causal=is_causal, mask=attn_mask)
        y_BTC = self.norm(y_BHTD.transpose(1, 2).flatten(2))
        if self.gate is not None:
            y_BTC = y_BTC * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y_BTC))


class LaplacianAttention(_WithOperators, Attention):  # type: ignore[misc]
    """timm's plain attention with Laplacian heads; its blocks pass the mask by name."""


class LaplacianAttentionRope(_WithOperators, AttentionRope):
    """timm's rotary attention with Laplacian heads."""


class LaplacianEvaAttention(_WithOperators, EvaAttention):
    """timm's EVA attention with Laplacian heads; its keys have no bias."""


def queries_keys_values(module: Any, x_BTC: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of attention, B x H x T x D: normed, rotated, keys and values repeated for each query head."""
    if module.qkv is not None:
        # EVA stores its biases outside `qkv`, the key bias as a buffer of zeros.
        biased = getattr(module, "q_bias", None) is not None
        bias = torch.cat((module.q_bias, module.k_bias, module.v_bias)) if biased else None
        qkv_BTC = F.linear(x_BTC, module.qkv.weight, bias) if biased else module.qkv(x_BTC)
        q, k, v = qkv_BTC.unflatten(2, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        kv_heads = getattr(module, "num_kv_heads", module.num_heads)
        parts = (module.q_proj, module.num_heads), (module.k_proj, kv_heads), (module.v_proj, kv_heads)
        q, k, v = (part(x_BTC).unflatten(2, (heads, -1)).transpose(1, 2) for part, heads in parts)
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        # Class and register tokens have no position in the image. Float32 tables widen q and k; SDPA takes one dtype.
        prefix, half = module.num_prefix_tokens, getattr(module, "rotate_half", False)
        rotated = (apply_rot_embed_cat(part[:, :, prefix:], rope, half=half) for part in (q, k))
        q, k = (
            torch.cat([part[:, :, :prefix], turned], dim=2).type_as(v)
            for part, turned in zip((q, k), rotated, strict=True)
        )
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return q, k, v


_LAPLACIAN: dict[type, type] = {
    Attention: LaplacianAttention,
    AttentionRope: LaplacianAttentionRope,
    EvaAttention: LaplacianEvaAttention,
}
_PLAIN = {ours: plain for plain, ours in _LAPLACIAN.items()}


def _transformers_layers(model: nn.Module) -> list[Any]:
    seen = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    unknown = [m for m in seen if _name(_plain(type(m))) not in _NORMS_FIRST or _is_special(m)]
    _refuse_unknown(model, seen, unknown, [*_NORMS_FIRST])
    return seen


def _is_special(module: Any) -> bool:
    """Return whether it is GPT-2's cross attention, or its upcast attention, which uses no attention function."""
    return getattr(module, "is_cross_attention", False) or getattr(module, "reorder_and_upcast_attn", False)


def _plain(kind: type) -> type:
    """Return the transformers class that one of our classes replaces."""
    # `_laplacian` and `_saved_with_plan` name the plain class second.
    return kind.__bases__[1] if issubclass(kind, _LaplacianHeads | _SavedWithPlan) else kind


#: Attention classes of transformers: whether queries and keys are normalised before the rotation.
_NORMS_FIRST = {
    "transformers.models.llama.modeling_llama.LlamaAttention": True,
    "transformers.models.qwen3.modeling_qwen3.Qwen3Attention": True,
    "transformers.models.nanochat.modeling_nanochat.NanoChatAttention": False,
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": True,
    "transformers.models.vit.modeling_vit.ViTAttention": True,
}


class _LaplacianHeads:
    """Transformers attention with operators that see the values of the current tokens."""

    operators: HeadOperators

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        plain = _plain(type(self))
        family: Any = inspect.getmodule(plain)
        q, k, v = (part.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for part in self._projected(hidden_states))
        norms = (self.q_norm, self.k_norm) if hasattr(self, "q_norm") else (nn.Identity(), nn.Identity())
        norms_first = _NORMS_FIRST[_name(plain)]
        if norms_first:
            q, k = norms[0](q), norms[1](k)
        if position_embeddings is not None:
            q, k = family.apply_rotary_pos_emb(q, k, *position_embeddings)  # the family's own: nanochat's differs
        if not norms_first:
            q, k = norms[0](q), norms[1](k)
        current_v_BGTD = v
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        eager = family.eager_attention_forward
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        if hasattr(self, "sliding_window"):
            options["sliding_window"] = self.sliding_window
        rate = self._dropout() if self.training else 0.0
        y_BTHD, weights = attention(self, q, k, v, attention_mask, dropout=rate, scaling=self.scaling, **options)
        y_BHTD = self.operators.epilogue(y_BTHD.transpose(1, 2), v, current_v_BGTD)
        return self._project(y_BHTD.transpose(1, 2).flatten(2)), weights

    def _projected(self: Any, x_BTC: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)

    def _dropout(self: Any) -> float:
        return float(self.attention_dropout)

    def _project(self: Any, y_BTC: Tensor) -> Tensor:
        return self.o_proj(y_BTC)


class _GPT2(_LaplacianHeads):
    def _projected(self: Any, x_BTC: Tensor) -> tuple[Tensor, ...]:
        return self.c_attn(x_BTC).chunk(3, dim=2)

    def _dropout(self: Any) -> float:
        return float(self.attn_dropout.p)

    def _project(self: Any, y_BTC: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(y_BTC))


class _ViT(_LaplacianHeads):
    """Attention without rotary positions; its blocks pass the mask by position."""

    def forward(  # type: ignore[override]
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, None, attention_mask, **options)


class _SavedWithPlan:
    """A model whose `save_pretrained` writes weights that a plain `from_pretrained` does not find."""

    def save_pretrained(self, save_directory: "str | Path", **options: Any) -> None:
        super().save_pretrained(save_directory, **{**options, "variant": VARIANT})  # type: ignore[misc]


@cache
def _laplacian(plain: type) -> type:
    own = {"GPT2Attention": _GPT2, "ViTAttention": _ViT}.get(plain.__name__, _LaplacianHeads)
    return type(f"Laplacian{plain.__name__}", (own, plain), {})


@cache
def _saved_with_plan(plain: type) -> type:
    return type(plain.__name__, (_SavedWithPlan, plain), {})  # the plain name: save_pretrained writes it to config.json
