"""Access to the blocks, norms, tokens and heads of a model: one adapter for each kind of model.

Every kind has blocks that map B x T x C to B x T x C, each with an `attn` and an `mlp`, and a norm after the last.
They differ in how queries, keys and values are computed, and in their tokens.

Shapes: B sequences, T tokens, C channels, H heads, D head size, K classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lapcli.heads.laplacian import HeadOperators
from lapcli.heads.plan import HeadPlan
from lapcli.models.dino_vit import DinoViT
from lapcli.models.gpt import GPT, rms_norm
from lapcli.runtime.errors import UsageError


@dataclass(frozen=True)
class HeadInputs:
    """The inputs of one layer's heads on one batch, and the projection of their outputs to the residual stream."""

    x_BTC: Tensor  # the residual stream before the layer
    q_BHTD: Tensor
    k_BHTD: Tensor
    v_BHTD: Tensor
    out_CI: Tensor  # output projection; its inputs I are the concatenated heads
    scale_C: Tensor | None  # LayerScale
    causal: bool
    operators: HeadOperators
    normed_BTC: Tensor  # the input of the layer's attention

    def outputs(self) -> Tensor:
        """Return the outputs of the heads, with their operators, before the output projection."""
        return self.operators(self.q_BHTD, self.k_BHTD, self.v_BHTD, x_BTC=self.normed_BTC, causal=self.causal)


class Anatomy:
    """A model's forward, blocks, norms and heads."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    plan: HeadPlan
    width: int
    causal: bool
    prefix_tokens = 0  # before the patches: class token, registers
    has_class_token = False
    classifier: nn.Linear | None = None
    patch: int | None = None  # side in pixels, if the model takes images of any size

    def run(self, inputs: Tensor) -> Tensor | None:
        """Run one forward, not compiled, so that hooks run; return logits if the model classifies sequences."""
        raise NotImplementedError

    def sequences(self, x: Tensor, count: int) -> Tensor:
        """Reshape the input or output of a block for `count` sequences to B x T x C."""
        return x

    def chosen_tokens(self, x_BTC: Tensor, tokens: str) -> Tensor:
        """Return `all` tokens, the `patch` tokens or the `class` token."""
        if tokens == "patch":
            return x_BTC[:, self.prefix_tokens :]
        return x_BTC[:, :1] if tokens == "class" else x_BTC

    def final_norm(self, x_BTC: Tensor) -> Tensor:
        raise NotImplementedError

    def heads(self, layer: int, x_BTC: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> HeadInputs:
        """Compute a layer's head inputs from its block's input and the arguments of its attention."""
        raise NotImplementedError

    @property
    def layers(self) -> int:
        return len(self.blocks)


class GPTAnatomy(Anatomy):
    causal = True

    def __init__(self, model: GPT) -> None:
        self.model, self._gpt = model, model
        self.blocks = list(model.blocks)
        self.plan, self.width = model.config.head_plan(), model.config.width

    def run(self, inputs: Tensor) -> None:
        self._gpt.hidden(inputs)

    def final_norm(self, x_BTC: Tensor) -> Tensor:
        return rms_norm(x_BTC)

    def heads(self, layer: int, x_BTC: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> HeadInputs:
        attn: Any = self.blocks[layer].attn
        normed_BTC, rotary = args[0], args[1]
        q, k, v = attn.queries_keys_values(normed_BTC, rotary, args[3] if len(args) > 3 else None)
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, dim=1) if groups > 1 else part for part in (k, v))
        return HeadInputs(x_BTC, q, k, v, attn.out.weight, None, True, attn.operators, normed_BTC)


class TimmAnatomy(Anatomy):
    """timm's ViTs with plain, RoPE or EVA attention, ours or stock."""

    causal = False

    def __init__(self, model: nn.Module) -> None:
        from lapcli.heads.laplacianize import attention_layers, head_plan_of

        name = type(model).__name__
        blocks = getattr(model, "blocks", None)
        try:
            plan, layers = head_plan_of(model), attention_layers(model)
        except ValueError as error:
            raise UsageError(f"{name} cannot be analysed: {error}") from None
        if not isinstance(blocks, nn.Sequential | nn.ModuleList) or len(layers) != len(blocks):
            raise UsageError(f"{name} cannot be analysed: it is not a plain stack of blocks with one attention each")
        if not all(hasattr(block, "attn") and hasattr(block, "mlp") for block in blocks):
            raise UsageError(f"{name} cannot be analysed: its blocks have no `attn` and `mlp` of their own")
        self.model, self.blocks, self.plan = model, list(blocks), plan
        self.width = int(model.embed_dim)  # type: ignore[arg-type]
        self.prefix_tokens = int(getattr(model, "num_prefix_tokens", 0))
        self.has_class_token = getattr(model, "cls_token", None) is not None
        head = getattr(model, "head", None)
        self.classifier = head if isinstance(head, nn.Linear) else None

    def run(self, inputs: Tensor) -> Tensor | None:
        logits = self.model.forward(inputs)  # not model(inputs): a compiled graph runs no hooks of blocks
        return logits if self.classifier is not None else None

    def final_norm(self, x_BTC: Tensor) -> Tensor:
        return self.model.norm(x_BTC)  # type: ignore[operator]

    def heads(self, layer: int, x_BTC: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> HeadInputs:
        from lapcli.heads.laplacianize import queries_keys_values

        block: Any = self.blocks[layer]
        attn = block.attn
        if not isinstance(attn.norm, nn.Identity) or attn.gate is not None:
            raise UsageError(
                "the attention of this model normalises or gates its heads jointly; `updates` cannot separate them"
            )
        rope = kwargs.get("rope", args[1] if len(args) > 1 else None)
        q, k, v = queries_keys_values(attn, args[0], rope)
        # `ls1.gamma` in plain ViTs, `gamma_1` in EVA; neither without LayerScale.
        scale = getattr(getattr(block, "ls1", None), "gamma", None)
        scale = getattr(block, "gamma_1", None) if scale is None else scale
        operators = getattr(attn, "operators", None)
        if operators is None:  # timm's own class
            operators = HeadOperators(self.plan, layer, q.shape[-1], self.width)
        return HeadInputs(x_BTC, q, k, v, attn.proj.weight, scale, False, operators, args[0])


class DinoAnatomy(Anatomy):
    """The self-supervised ViT for images of any size; its blocks take the tokens of all images as one matrix."""

    causal = False
    prefix_tokens = 1
    has_class_token = True

    def __init__(self, model: DinoViT) -> None:
        self.model, self._vit = model, model
        self.blocks = list(model.blocks)
        self.plan, self.width, self.patch = model.plan, model.width, model.patch

    def run(self, inputs: Tensor) -> None:
        self._vit.features(inputs)  # not `tokens`, which may be compiled

    def sequences(self, x: Tensor, count: int) -> Tensor:
        return x.view(count, -1, self.width)

    def final_norm(self, x_BTC: Tensor) -> Tensor:
        return self._vit.norm(x_BTC)

    def heads(self, layer: int, x_BTC: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> HeadInputs:
        block: Any = self.blocks[layer]
        attn, normed_NC, group = block.attn, args[0], args[1][0]  # one group: all images have one size
        q, k, v = attn.queries_keys_values(attn.qkv(normed_NC), group)
        normed_BTC = normed_NC.view_as(x_BTC)
        return HeadInputs(x_BTC, q, k, v, attn.proj.weight, block.gamma_1, False, attn.operators, normed_BTC)


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return the adapter for a built model."""
    if isinstance(model, GPT):
        return GPTAnatomy(model)
    return DinoAnatomy(model) if isinstance(model, DinoViT) else TimmAnatomy(model)
