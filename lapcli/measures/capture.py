"""One pass of a model feeds every measurement: hooks pass each layer's tokens to listeners and store nothing.

Adapters give access to the parts of a kind of model. Every kind has blocks that map B x T x C to B x T x C, each with
an `attn` and an `mlp`, and a norm after the last. They differ in how queries, keys and values are computed, and in
their tokens.

Shapes: B sequences, T tokens, C channels, H heads, D head size, K classes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapcli.heads.laplacian import HeadOperators
from lapcli.heads.laplacianize import head_plan_of, queries_keys_values
from lapcli.heads.plan import HeadPlan
from lapcli.measures.tokens import to_float64
from lapcli.models.dino_vit import DinoViT
from lapcli.models.gpt import GPT, rms_norm
from lapcli.runtime.errors import LapError, UsageError


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
        """Run one forward; return logits if the model classifies sequences."""
        out: Tensor = self.model(inputs)
        return None if self.classifier is None else out

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
        try:
            plan, blocks = head_plan_of(model), list(model.blocks)  # type: ignore[arg-type]
            if not all(hasattr(block, "attn") and hasattr(block, "mlp") for block in blocks):
                raise ValueError("its blocks have no `attn` and `mlp` of their own")
        except ValueError as error:
            raise UsageError(f"{type(model).__name__} cannot be analysed: {error}") from None
        self.model, self.blocks, self.plan = model, blocks, plan
        self.width = int(model.embed_dim)  # type: ignore[arg-type]
        self.prefix_tokens = int(getattr(model, "num_prefix_tokens", 0))
        self.has_class_token = getattr(model, "cls_token", None) is not None
        head = getattr(model, "head", None)
        self.classifier = head if isinstance(head, nn.Linear) else None

    def final_norm(self, x_BTC: Tensor) -> Tensor:
        return self.model.norm(x_BTC)  # type: ignore[operator]

    def heads(self, layer: int, x_BTC: Tensor, args: tuple, kwargs: Mapping[str, Any]) -> HeadInputs:
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


@dataclass(frozen=True)
class Batch:
    inputs: Tensor
    labels: Tensor | None  # B classes of sequences, or B x T classes of tokens
    first: int  # number of its first example in the data


@dataclass(frozen=True)
class Site:
    """A place in the model: the output of a block, before or after the model's last norm, or the input of its MLP."""

    layer: int
    place: Literal["output", "mlp_input"] = "output"
    tokens: str = "all"  # or patch, class
    norm: str = "before"  # or after


TokenListener = Callable[[Tensor, Batch], None]  # float64 tokens, B x T x C
LabelledTokenListener = Callable[[Tensor, Tensor, int], None]  # tokens, their labels, number of the first sequence
HeadListener = Callable[[HeadInputs, Batch], None]
LogitListener = Callable[[Tensor, Batch], None]


class Capture:
    """Add listeners, then `run` over the batches once."""

    def __init__(self, anatomy: Anatomy, name: str = "the model") -> None:
        self._anatomy, self._name = anatomy, name
        self._tokens: dict[Site, list[TokenListener]] = defaultdict(list)
        self._heads: dict[int, list[HeadListener]] = defaultdict(list)
        self._logits: list[LogitListener] = []
        self._batch: Batch
        self._block_input: Tensor
        self.sequences = 0
        self.tokens = 0  # of all sequences, whichever tokens the listeners receive

    def on_tokens(self, site: Site, listener: TokenListener) -> None:
        self._tokens[site].append(listener)

    def on_labelled_tokens(self, site: Site, listener: LabelledTokenListener) -> None:
        def with_labels(tokens: Tensor, batch: Batch) -> None:
            assert batch.labels is not None
            listener(tokens, batch.labels.to(tokens.device), batch.first)

        self.on_tokens(site, with_labels)

    def on_heads(self, layer: int, listener: HeadListener) -> None:
        self._heads[layer].append(listener)

    def on_logits(self, listener: LogitListener) -> None:
        self._logits.append(listener)

    @torch.no_grad()
    def run(self, batches: Iterable[Batch], progress: Callable[[int], None] | None = None) -> None:
        """Run the model over the batches and restore its mode; LapError names a layer whose values are not finite."""
        model = self._anatomy.model
        was_training = model.training
        hooks = self._hook()
        model.eval()
        try:
            for batch in batches:
                self._batch = batch
                logits = self._anatomy.run(batch.inputs)
                if logits is not None:
                    for listener in self._logits:
                        listener(logits.detach(), batch)
                self.sequences += len(batch.inputs)
                if progress:
                    progress(self.sequences)
        finally:
            for hook in hooks:
                hook.remove()
            model.train(was_training)

    def _hook(self) -> list[Any]:
        hooks: list[Any] = []
        for layer, block in enumerate(self._anatomy.blocks):
            if layer == 0:
                # At a block, not from the inputs: images become tokens only inside the model.
                hooks.append(block.register_forward_pre_hook(self._count))
            for place in ("output", "mlp_input"):
                sites = [site for site in self._tokens if site.layer == layer and site.place == place]
                if sites and place == "output":
                    # `sites=sites` binds at definition; a closure would use the sites of the last layer.
                    hooks.append(block.register_forward_hook(lambda _, __, out, sites=sites: self._see(sites, out)))
                elif sites:
                    mlp: Any = block.mlp
                    hooks.append(mlp.register_forward_pre_hook(lambda _, args, sites=sites: self._see(sites, args[0])))
            if layer in self._heads:
                attn: Any = block.attn
                hooks.append(block.register_forward_pre_hook(self._keep_input))
                hooks.append(
                    # timm passes `rope` by keyword, which a hook sees only with `with_kwargs`.
                    attn.register_forward_pre_hook(
                        lambda _, args, kwargs, layer=layer: self._see_heads(layer, args, kwargs), with_kwargs=True
                    )
                )
        return hooks

    def _count(self, _: Any, args: tuple) -> None:
        self.tokens += self._sequences(args[0])[..., 0].numel()

    def _sequences(self, x: Tensor) -> Tensor:
        return self._anatomy.sequences(x, len(self._batch.inputs))

    def _see(self, sites: list[Site], x: Tensor) -> None:
        x_BTC = self._sequences(x)
        for site in sites:
            chosen = self._anatomy.chosen_tokens(x_BTC, site.tokens)
            tokens = to_float64(self._anatomy.final_norm(chosen) if site.norm == "after" else chosen)
            if not bool(torch.isfinite(tokens).all()):
                raise LapError(
                    f"layer {site.layer} of {self._name} gives values that are not finite; "
                    "these weights cannot be analysed, take an earlier checkpoint"
                )
            for listener in self._tokens[site]:
                listener(tokens, self._batch)

    def _keep_input(self, _: Any, args: tuple) -> None:
        self._block_input = self._sequences(args[0])

    def _see_heads(self, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs = self._anatomy.heads(layer, self._block_input, args, kwargs)
        for listener in self._heads[layer]:
            listener(inputs, self._batch)
