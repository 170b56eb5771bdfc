"""The paper's GPT: nanochat's model of late 2025 with Laplacian heads, or any other head operators.

    x = norm(embed(tokens))
    each block:  x = x + out(attention(norm(x)));  x = x + down(relu(up(norm(x)))^2)
    logits = softcap * tanh(head(norm(x)) / softcap)

RMSNorm without a gain, rotary positions (first half of a head against its second half, rotated by -theta), queries
and keys normalised per head, no biases, embedding and head not tied. The attention output, the MLP output and the
head start at zero, so at step 0 Laplacian heads change nothing and only the head gets a gradient.

Three parts of nanochat's model of 2026 can be switched on (`residual_lambdas`, `x0_lambdas`, `value_embeddings`):

    before block i:  x = r_i x + s_i x_0,  x_0 = norm(embed(tokens)), without one of them r_i = 1 or s_i = 0
    in every other block, the last one included:  v = v + 3 sigmoid(gate(x[:12])) value_embed(tokens), x as v's input

The embedding's dtype is that of all activations: bf16 with `precision: bf16`, where every other weight stays float32
and is cast when it is used. Dtypes are explicit because autocast of torch >= 2.12 returns float32 from
RMSNorm.

Shapes: B batch, T tokens, C width, H heads, G key and value heads, D head size, V vocabulary, S tokens in the cache.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lapcli.heads.laplacian import HeadOperators, initialise_operators
from lapcli.models.chunked_loss import Reduction, softcapped_cross_entropy
from lapcli.models.compiling import compiled
from lapcli.recipe.schema import GATE_CHANNELS, GPTModel
from lapcli.recipe.section import Whole
from lapcli.runtime.devices import ComputePolicy


class GPTConfig(GPTModel):
    """The `model` section of a recipe and the size of its tokenizer's vocabulary."""

    vocab: Annotated[Whole, Field(ge=1)]

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def groups(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a layer has value embeddings: every other layer, including the last."""
        return self.value_embeddings and (self.layers - 1 - layer) % 2 == 0

    @property
    def added_parts(self) -> list[str]:
        """Return the parts of nanochat's model of 2026 that are on."""
        return [name for name in (*LAMBDAS, "value_embeddings") if getattr(self, name)]

    @property
    def positions(self) -> int:
        """Rows of the rotary table: generation may go ten times beyond the training context."""
        return 10 * self.context


#: Initial value of the first and last layer, linear in between (nanochat, gpt.py of July 2026).
LAMBDAS = {"residual_lambdas": (1.15, 1.05), "x0_lambdas": (0.20, 0.05)}
ADDED = (*LAMBDAS, "value_embed.")


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class _ReLUSquared(torch.autograd.Function):
    """Compute y = relu(x)^2 and save only the result, as compiled code does: the largest activation of a block once.

    dx = 2 relu(x) dy = 2 sqrt(y) dy
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.relu().square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # The root as y / sqrt(y): torch's sqrt is ten times slower than its rsqrt on a CPU.
        # Clamped, since the infinite rsqrt of 0 times 0 would be NaN.
        root = y.clamp_min(torch.finfo(y.dtype).tiny).rsqrt_().mul_(y)
        return torch.addcmul(root.new_zeros(()), root, dy, value=2, out=root)  # 2 root dy in one pass, over the root


class Linear(nn.Module):
    """A linear layer without bias; the float32 weight is cast to the dtype of its input. `GPT.initialise` sets it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    """Token embedding; `GPT.initialise` sets its weight."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class KVCache:
    """Keys (after rotary and norm) and values of the tokens so far, for every layer."""

    def __init__(
        self, config: GPTConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (config.layers, batch, config.groups, length, config.head_size)
        self.k_LBGSD = torch.empty(shape, dtype=dtype, device=device)
        self.v_LBGSD = torch.empty(shape, dtype=dtype, device=device)
        self.position = 0
        self.mask: Tensor | None = None  # B x 1 x T x S if rows differ in length; None: causal

    def positions(self, tokens: int) -> "slice | Tensor":
        """Return the positions of the next tokens: one range for all rows (B x T numbers if rows differ in length)."""
        return slice(self.position, self.position + tokens)

    def advance(self, tokens: int) -> None:
        """Advance the position; called once all layers have inserted."""
        self.position += tokens

    def insert(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens and return everything up to them; `advance` moves the position after all layers."""
        end = self.position + k_BGTD.shape[2]
        if end > self.k_LBGSD.shape[3]:
            raise ValueError(f"the cache holds {self.k_LBGSD.shape[3]} tokens, {end} do not fit")
        self.k_LBGSD[layer, :, :, self.position : end] = k_BGTD
        self.v_LBGSD[layer, :, :, self.position : end] = v_BGTD
        return self.k_LBGSD[layer, :, :, :end], self.v_LBGSD[layer, :, :, :end]


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.head_size
        self.operators = HeadOperators(config.head_plan(), layer, config.head_size, config.width)
        self.q = Linear(config.width, config.width)
        self.k = Linear(config.width, config.groups * config.head_size)
        self.v = Linear(config.width, config.groups * config.head_size)
        self.out = Linear(config.width, config.width)
        if config.has_value_embedding(layer):
            self.value_gate = Linear(GATE_CHANNELS, config.groups)

    def forward(
        self,
        x_BTC: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        embedded_BTC: Tensor | None = None,
    ) -> Tensor:
        B, T, _ = x_BTC.shape
        q_BHTD, k_BGSD, v_BGSD = self.queries_keys_values(x_BTC, rotary, embedded_BTC)
        mask, current_v = None, None
        if cache is not None:
            # If rows differ in length, the last of the S values is not the current token's.
            mask, current_v = cache.mask, None if cache.mask is None else v_BGSD
            k_BGSD, v_BGSD = cache.insert(self.layer, k_BGSD, v_BGSD)
        y_BHTD = self.operators(
            *(q_BHTD, k_BGSD, v_BGSD),
            x_BTC=x_BTC,
            causal=mask is None,
            mask=mask,
            current_v_BGTD=current_v,
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1))

    def queries_keys_values(
        self, x_BTC: Tensor, rotary: tuple[Tensor, Tensor], embedded_BTC: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return B x H x T x D queries and B x G x T x D keys and values, rotated and normalised.

        `embedded_BTC`: value embeddings of the tokens.
        """
        B, T, _ = x_BTC.shape
        q_BTHD, k_BTGD, v_BTGD = (p(x_BTC).view(B, T, -1, self.head_size) for p in (self.q, self.k, self.v))
        if embedded_BTC is not None:
            gate_BTG1 = 3 * torch.sigmoid(self.value_gate(x_BTC[..., :GATE_CHANNELS]))[..., None]
            v_BTGD = v_BTGD + gate_BTG1 * embedded_BTC.to(v_BTGD.dtype).view(v_BTGD.shape)
        # Rotated before the norm, as in nanochat: a rotation keeps the norm, so the order only affects rounding.
        q_BHTD, k_BGTD = (rms_norm(rotate(part, rotary)).transpose(1, 2) for part in (q_BTHD, k_BTGD))
        return q_BHTD, k_BGTD, v_BTGD.transpose(1, 2)


def rotate(x_BTHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel pairs (i, i + D/2) by -theta."""
    cos_T1D, sin_T1D = rotary
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat([a * cos_T1D + b * sin_T1D, b * cos_T1D - a * sin_T1D], dim=-1).to(x_BTHD.dtype)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(F.relu(hidden).square() if torch.compiler.is_compiling() else _ReLUSquared.apply(hidden))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config.width)

    def forward(
        self,
        x_BTC: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: KVCache | None = None,
        embedded_BTC: Tensor | None = None,
    ) -> Tensor:
        x_BTC = x_BTC + self.attn(rms_norm(x_BTC), rotary, cache, embedded_BTC)
        return x_BTC + self.mlp(rms_norm(x_BTC))


def spectral_std(outputs: int, inputs: int) -> float:
    """Return the spectral condition (Yang, Simon and Bernstein, 2023, arXiv 2310.17813), as in nanochat."""
    return float(inputs**-0.5 * min(1.0, (outputs / inputs) ** 0.5))


class GPT(nn.Module):
    cos_PD: Tensor
    sin_PD: Tensor
    residual_lambdas: Tensor  # L, as the next; only where the config switches them on
    x0_lambdas: Tensor

    def __init__(self, config: GPTConfig, *, is_initialised: bool = True) -> None:
        """Without `is_initialised` the weights are arbitrary, to be overwritten by loading. The same holds on the meta
        device until the model has storage and `initialise` is called."""
        super().__init__()
        self.config = config
        self._compiled_hidden: Callable[[Tensor], Tensor] | None = None
        self._compiles_loss = False
        self.policy: ComputePolicy | None = None  # None: that of the device of the weights
        self.embed = Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.head = Linear(config.width, config.vocab)
        for name in ("residual_lambdas", "x0_lambdas"):
            if getattr(config, name):
                self.register_parameter(name, nn.Parameter(torch.empty(config.layers)))
        layers = [layer for layer in range(config.layers) if config.has_value_embedding(layer)]
        kv_width = config.groups * config.head_size
        self.value_embed = nn.ModuleDict({str(layer): Embedding(config.vocab, kv_width) for layer in layers})
        for name in ("cos_PD", "sin_PD"):
            table = torch.empty(config.positions, config.head_size // 2)
            self.register_buffer(name, table, persistent=False)
        if self.embed.weight.is_meta:
            return
        if is_initialised:
            self.initialise()
        else:
            self.fill_rotary_tables()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Set every weight and table; needed after a model built on the meta device was given storage."""
        for name, weight in self.named_parameters():
            # Initialised last, so that other weights do not depend on them.
            if ".operators." in name or name.startswith(ADDED) or "value_gate" in name:
                continue
            if name == "embed.weight":
                nn.init.normal_(weight, generator=generator)
            elif name.endswith(("attn.out.weight", "mlp.down.weight", "head.weight")):
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=spectral_std(*weight.shape), generator=generator)
        initialise_operators(self, generator)
        for name, weight in self.named_parameters():
            if name in LAMBDAS:
                weight.copy_(torch.linspace(*LAMBDAS[name], len(weight)))
            elif name.startswith("value_embed"):
                nn.init.normal_(
                    weight, std=spectral_std(weight.shape[1], self.config.width), generator=generator
                )  # as v
            elif "value_gate" in name:
                nn.init.uniform_(weight, 0.0, 0.02, generator=generator)
        self.fill_rotary_tables()

    def fill_rotary_tables(self) -> None:
        device, half = self.cos_PD.device, self.config.head_size // 2
        base, steps = self.config.rotary_base, torch.arange(half, dtype=torch.float32, device=device)
        frequencies = torch.zeros_like(steps) if base is None else base ** (-steps / half)  # zero: nothing is rotated
        # In float32 and rounded at the end, as in nanochat: bf16 has no odd numbers beyond 256.
        angles_PD = torch.arange(self.config.positions, dtype=torch.float32, device=device)[:, None] * frequencies
        dtype = torch.bfloat16 if self.config.rotary_precision == "bf16" else torch.float32
        self.cos_PD, self.sin_PD = angles_PD.cos().to(dtype), angles_PD.sin().to(dtype)

    def use_compile(self, *, any_length: bool = False) -> "GPT":
        """Compile the blocks and the elementwise part of the loss, in training and its validation: `loss` uses them.

        `any_length`: the length of sequences differs between batches, so one graph of the blocks serves all.
        """
        self._compiled_hidden = compiled(self.hidden, any_length=any_length)
        self._compiles_loss = not any_length  # its graph has a fixed shape: each length would compile another
        return self

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the normalised output of the last block, B x T x C."""
        T = tokens_BT.shape[1]
        first = 0 if cache is None else cache.position
        if first + T > len(self.cos_PD):
            raise ValueError(f"positions end at {len(self.cos_PD)}, cannot place token {first + T}")
        places = slice(0, T) if cache is None else cache.positions(T)
        rotary = self.cos_PD[places].unsqueeze(-2), self.sin_PD[places].unsqueeze(-2)
        x_BTC = rms_norm(self.embed(tokens_BT))
        x0_BTC = x_BTC
        for layer, block in enumerate(self.blocks):
            if self.config.residual_lambdas:
                x_BTC = self.residual_lambdas[layer].to(x_BTC.dtype) * x_BTC
            if self.config.x0_lambdas:
                x_BTC = x_BTC + self.x0_lambdas[layer].to(x_BTC.dtype) * x0_BTC
            has_values = self.config.has_value_embedding(layer)
            embedded_BTC = self.value_embed[str(layer)](tokens_BT) if has_values else None
            x_BTC = block(x_BTC, rotary, cache, embedded_BTC)
        if cache is not None:
            cache.advance(T)
        return rms_norm(x_BTC)

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return soft-capped logits, B x T x V, in float32 (float64 for a float64 model)."""
        return self.logits(self.hidden(tokens_BT, cache))

    def logits(self, x: Tensor) -> Tensor:
        """Return soft-capped logits of any outputs of `hidden`."""
        logits = self.head(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return self.config.softcap * torch.tanh(logits / self.config.softcap)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Compute the cross entropy over the targets that are not -1, without materialising all logits.

        The reduction `none` returns B x T losses without gradients.
        """
        x_NC = (self._compiled_hidden or self.hidden)(tokens_BT).flatten(0, 1)
        loss = softcapped_cross_entropy(
            x_NC,
            self.head.weight,
            targets_BT.flatten(),
            self.config.softcap,
            reduction,
            self._compiles_loss,
            self.policy,
        )
        return loss.view(targets_BT.shape) if reduction == "none" else loss

    def matrix_parameters(self) -> int:
        """Count the weights of matmuls: not the embeddings."""
        tables = [module.weight.numel() for module in self.modules() if isinstance(module, Embedding)]
        return sum(p.numel() for p in self.parameters() if p.ndim > 1) - sum(tables)


#: Names of tensors: ours, those of nanochat's checkpoints, and those of transformers' `nanochat`; `N` is the layer.
_NAMES = (
    ("embed.weight", "transformer.wte.weight", "model.embed_tokens.weight"),
    ("head.weight", "lm_head.weight", "lm_head.weight"),
    ("blocks.N.attn.q.weight", "transformer.h.N.attn.c_q.weight", "model.layers.N.self_attn.q_proj.weight"),
    ("blocks.N.attn.k.weight", "transformer.h.N.attn.c_k.weight", "model.layers.N.self_attn.k_proj.weight"),
    ("blocks.N.attn.v.weight", "transformer.h.N.attn.c_v.weight", "model.layers.N.self_attn.v_proj.weight"),
    ("blocks.N.attn.out.weight", "transformer.h.N.attn.c_proj.weight", "model.layers.N.self_attn.o_proj.weight"),
    ("blocks.N.mlp.up.weight", "transformer.h.N.mlp.c_fc.weight", "model.layers.N.mlp.fc1.weight"),
    ("blocks.N.mlp.down.weight", "transformer.h.N.mlp.c_proj.weight", "model.layers.N.mlp.fc2.weight"),
)
_TO_TRANSFORMERS = {ours: theirs for ours, _, theirs in _NAMES}
_FROM_NANOCHAT = {theirs: ours for ours, theirs, _ in _NAMES}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def to_transformers(name: str) -> str:
    renamed = _renamed(name, _TO_TRANSFORMERS)
    assert renamed is not None, name
    return renamed


def from_nanochat(name: str) -> str | None:
    """Return our name for a tensor; None if our GPT does not have it. A prefix of `torch.compile` is removed."""
    return _renamed(name.removeprefix("_orig_mod."), _FROM_NANOCHAT)


def _renamed(name: str, table: dict[str, str]) -> str | None:
    layer = _LAYER.search(name)
    renamed = table.get(_LAYER.sub("N", name, count=1))
    return renamed if renamed is None or layer is None else renamed.replace(".N.", f".{layer[0]}.")
