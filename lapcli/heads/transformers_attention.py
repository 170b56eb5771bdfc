"""Laplacian heads in models of transformers: `laplacianize(model, laplacian_heads)`, which also takes timm's.

The attention modules of a built model change their class and nothing else: parameters and their names stay. A layer
without Laplacian heads keeps its own class. A Laplacian head subtracts from the values of the *current* tokens, which
are taken before the cache is updated: the last rows of a static cache are not the current tokens. The subtraction is
outside the attention function, so that sdpa, eager, flash and flex attention all work.

The weights of such a model would load into a plain one without an error, and compute nonsense. So `save_pretrained`
names them `model.laplacian.safetensors` (the variant `laplacian`): a plain `from_pretrained` fails, and
`load_laplacian` restores the plan of the config.

Shapes: B batch, T tokens, C width, H heads, G key and value heads, S tokens in the cache, D head size.
"""

import inspect
import json
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from lapcli.heads import timm_attention
from lapcli.heads.operator_attention import HeadOperators
from lapcli.heads.plan import HeadPlan, HeadSpec, head_plan

if TYPE_CHECKING:
    from pathlib import Path

Model = TypeVar("Model", bound=nn.Module)
VARIANT = "laplacian"


def laplacianize(model: Model, laplacian_heads: HeadSpec) -> Model:
    """Turn the last heads of each layer into Laplacian heads, in place, and return the model.

    `laplacian_heads` is a number, a list with one number per layer, `"linear(0, 12)"` or
    `{"layers": "6-11", "heads": 12}`; 0 restores the plain model. Operators by name, `{"exclusive": 4}`, may only use a
    head's values and attention's output, and have no parameters in a model of transformers. Supported are the llama,
    qwen3, gpt2, nanochat and vit families of transformers, and timm's plain, RoPE and EVA attention; for any other,
    ValueError names the attention classes of the model, and nothing is changed.

    Weights and their names stay, but a Laplacian head computes another function of them: a pretrained model needs
    fine-tuning afterwards.
    """
    if not _is_of_transformers(model):
        return timm_attention.laplacianize(model, laplacian_heads)
    layers = _attention_layers(model)
    config: Any = model.config
    plan = head_plan(laplacian_heads, len(layers), config.num_attention_heads)
    timm_attention.refuse_needs(plan)
    _refuse_parameters(plan)
    for number, module in enumerate(layers):
        plain = _plain(type(module))
        operators = HeadOperators(plan, number, 1, 1)  # the sizes do not matter without parameters
        module.__class__ = _laplacian(plain) if operators.claims else plain
        object.__setattr__(module, "operators", operators)  # not as a submodule, so that nothing of it is saved
    plain_model = _plain(type(model))
    model.__class__ = plain_model if plan.is_plain else _saved_with_plan(plain_model)
    keys = plan.recipe_keys()
    config.laplacian_heads = keys["operators"] or keys["laplacian_heads"]
    if any(len(claims) > 1 for claims in plan.layers):
        # As text: transformers sorts the keys of config.json, and the order of operators counts.
        config.laplacian_heads = str(plan)
    return model


def _refuse_parameters(plan: HeadPlan) -> None:
    for operator in dict.fromkeys(claim.operator for layer in plan.layers for claim in layer):
        if operator.adds_parameters:
            raise ValueError(
                f"{operator.name} learns parameters, which from_pretrained would drop when the model is loaded again; "
                "use constants without `learn`, or train it with model.operators in a recipe"
            )


def load_laplacian(kind: type, folder: "str | Path", **options: Any) -> Any:
    """Load what a laplacianized model saved; `kind` is its class, or one of transformers' Auto classes."""
    model = kind.from_pretrained(folder, variant=VARIANT, **options)  # type: ignore[attr-defined]
    plan = getattr(model.config, "laplacian_heads", None)
    if plan is None:
        raise ValueError(
            f"{folder} has no laplacian_heads in its config.json; it was not saved by a laplacianized model"
        )
    return laplacianize(model, json.loads(plan) if isinstance(plan, str) else plan)


def _is_of_transformers(model: nn.Module) -> bool:
    # By name: for a model of timm transformers is not imported.
    return any(each.__module__.startswith("transformers.") for each in type(model).__mro__)


def _attention_layers(model: nn.Module) -> list[Any]:
    seen = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    unknown = sorted({_name(type(m)) for m in seen if _name(_plain(type(m))) not in _FAMILIES or _is_special(m)})
    if unknown or not seen:
        problem = "unsupported attention" if seen else "no attention"
        known = ", ".join(_FAMILIES)
        raise ValueError(f"{type(model).__name__} has {problem}; saw {', '.join(unknown) or 'none'}, expected {known}")
    return seen


def _is_special(module: Any) -> bool:
    """Return whether the model is GPT-2 with cross attention, or with upcast attention, which bypasses the attention
    functions."""
    return getattr(module, "is_cross_attention", False) or getattr(module, "reorder_and_upcast_attn", False)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(kind: type) -> type:
    """Return the class of transformers that a class of ours replaces."""
    # `_laplacian` and `_saved_with_plan` name the plain class second.
    return kind.__bases__[1] if issubclass(kind, _OURS) else kind


class _LaplacianHeads:
    """Attention of transformers, with operators that see the values of the current tokens."""

    operators: HeadOperators
    config: Any
    layer_idx: int
    scaling: float
    norms_first = True  # of queries and keys, before the rotation

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        q_BHTD, k_BGSD, v_BGSD = self._queries_keys_values(hidden_states, position_embeddings)
        current_v_BGTD = v_BGSD
        if past_key_values is not None:
            k_BGSD, v_BGSD = past_key_values.update(k_BGSD, v_BGSD, self.layer_idx)
        family: Any = inspect.getmodule(_plain(type(self)))
        eager = family.eager_attention_forward
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        if hasattr(self, "sliding_window"):
            options["sliding_window"] = self.sliding_window
        rate = self._dropout() if self.training else 0.0
        y_BTHD, weights = attention(
            self, q_BHTD, k_BGSD, v_BGSD, attention_mask, dropout=rate, scaling=self.scaling, **options
        )
        y_BHTD = self.operators.epilogue(y_BTHD.transpose(1, 2), v_BGSD, current_v_BGTD)
        return self._project(y_BHTD.transpose(1, 2).flatten(2)), weights

    def _queries_keys_values(
        self: Any, x_BTC: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, normalised and rotated as in the model family."""
        q, k, v = (part.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for part in self._projected(x_BTC))
        norms = (self.q_norm, self.k_norm) if hasattr(self, "q_norm") else (nn.Identity(), nn.Identity())
        if self.norms_first:
            q, k = (norm(part) for norm, part in zip(norms, (q, k), strict=True))
        if rotary is not None:
            family: Any = inspect.getmodule(_plain(type(self)))
            q, k = family.apply_rotary_pos_emb(q, k, *rotary)  # the family's own: nanochat rotates the other way
        if not self.norms_first:
            q, k = (norm(part) for norm, part in zip(norms, (q, k), strict=True))
        return q, k, v

    def _projected(self: Any, x_BTC: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)

    def _dropout(self: Any) -> float:
        return float(self.attention_dropout)

    def _project(self: Any, y_BTC: Tensor) -> Tensor:
        return self.o_proj(y_BTC)


class _NanoChat(_LaplacianHeads):
    norms_first = False


class _GPT2(_LaplacianHeads):
    def _projected(self: Any, x_BTC: Tensor) -> tuple[Tensor, ...]:
        return self.c_attn(x_BTC).chunk(3, dim=2)

    def _dropout(self: Any) -> float:
        return float(self.attn_dropout.p)

    def _project(self: Any, y_BTC: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(y_BTC))


class _ViT(_LaplacianHeads):
    """Attention without rotary positions and without a cache."""

    def forward(  # type: ignore[override]
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, None, attention_mask, **options)


class _SavedWithPlan:
    """A model whose `save_pretrained` writes weights that a plain `from_pretrained` does not find."""

    def save_pretrained(self, save_directory: "str | Path", **options: Any) -> None:
        super().save_pretrained(save_directory, **{**options, "variant": VARIANT})  # type: ignore[misc]


_OURS = (_LaplacianHeads, _SavedWithPlan)
_FAMILIES: dict[str, type] = {
    "transformers.models.llama.modeling_llama.LlamaAttention": _LaplacianHeads,
    "transformers.models.qwen3.modeling_qwen3.Qwen3Attention": _LaplacianHeads,
    "transformers.models.nanochat.modeling_nanochat.NanoChatAttention": _NanoChat,
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": _GPT2,
    "transformers.models.vit.modeling_vit.ViTAttention": _ViT,
}


@cache
def _laplacian(plain: type) -> type:
    return type(f"Laplacian{plain.__name__}", (_FAMILIES[_name(plain)], plain), {})


@cache
def _saved_with_plan(plain: type) -> type:
    return type(plain.__name__, (_SavedWithPlan, plain), {})  # the plain name: save_pretrained writes it to config.json
