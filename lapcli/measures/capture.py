"""One pass of a model feeds every measurement: hooks pass each layer's tokens to listeners and store nothing.

Shapes: B sequences, T tokens, C channels.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapcli.measures.tokens import to_float64
from lapcli.models.anatomy import Anatomy, HeadInputs
from lapcli.runtime.errors import LapError


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
                with _uncompiled(model):
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
                    # `sites=sites` binds at definition; a closure would see the sites of the last layer.
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


def _uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled blocks run in eager mode: hooks would break their graphs into pieces."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
