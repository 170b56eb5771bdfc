"""The paper's GPT: nanochat's model of late 2025 with Laplacian heads.

    x = norm(embed(tokens))
    each block:  x = x + out(attention(norm(x)));  x = x + down(relu(up(norm(x)))^2)
    logits = softcap * tanh(head(norm(x)) / softcap)

RMSNorm without a gain, rotary positions (first half of a head against its second half, rotated by -theta), queries
and keys normalised per head, no biases, embedding and head not tied. The attention output, the MLP output and the
head start at zero, so at step 0 Laplacian heads change nothing and only the head gets a gradient.

The embedding's dtype is the dtype of the whole stream: bf16 in `precision: bf16`, where every other weight stays
float32 and is cast where it is used. Dtypes are explicit because autocast of torch >= 2.12 returns float32 from
RMSNorm.

Shapes: B batch, T tokens, C width, H heads, G key and value heads, D head size, V vocabulary, S tokens in the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.heads.laplacian import laplacian_attention
from lapcli.heads.plan import HeadPlan, HeadSpec, head_plan
from lapcli.models.chunked_loss import LARGEST_SOFTCAP, Reduction, softcapped_cross_entropy
from lapcli.models.compiling import compiled
from lapcli.models.lean import relu_squared, rms_norm


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int
    heads: int
    width: int
    vocab: int
    context: int = 2048
    kv_heads: int | None = None
    laplacian_heads: HeadSpec = 0
    rotary_base: float = 10_000.0
    rotary_precision: Literal["float32", "bf16"] = "float32"
    softcap: float = 15.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "vocab", "context", "groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{'kv_heads' if name == 'groups' else name} must be at least 1")
        if self.rotary_base <= 1 or self.rotary_precision not in ("float32", "bf16"):
            raise ValueError("rotary_base must be above 1, and rotary_precision float32 or bf16")
        if self.width % self.heads or self.head_size % 2:
            raise ValueError(f"width {self.width} does not give {self.heads} heads of an even size")
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads cannot share {self.groups} key and value heads evenly")
        if not 0 < self.softcap <= LARGEST_SOFTCAP:
            raise ValueError(f"softcap {self.softcap} is not within 0 and {LARGEST_SOFTCAP:g}")
        self.head_plan  # noqa: B018  a bad plan is an error now, not at the first forward

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def groups(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_plan(self) -> HeadPlan:
        return head_plan(self.laplacian_heads, self.layers, self.heads)

    @property
    def positions(self) -> int:
        """Rows of the rotary table: generation may go ten times beyond the training context."""
        return 10 * self.context


class Linear(nn.Linear):
    """Without bias; the float32 weight is cast to the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """Drawn by `GPT.initialise`: torch's own draw on the meta device imports its compiler, which takes seconds."""

    def reset_parameters(self) -> None:
        if self.weight.device.type != "meta":
            super().reset_parameters()


class KVCache:
    """Keys (after rotary and norm) and values of the tokens so far, for every layer."""

    def __init__(
        self, config: GPTConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (config.layers, batch, config.groups, length, config.head_size)
        self.k_LBGSD = torch.empty(shape, dtype=dtype, device=device)
        self.v_LBGSD = torch.empty(shape, dtype=dtype, device=device)
        self.position = 0
        self.mask: Tensor | None = None  # B, 1, T, S where rows differ in length; none: causal

    def positions(self, tokens: int) -> "slice | Tensor":
        """Where the next tokens stand: one range for all rows (a cache of unequal rows gives B x T numbers)."""
        return slice(self.position, self.position + tokens)

    def advance(self, tokens: int) -> None:
        """Called once all layers have inserted."""
        self.position += tokens

    def insert(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new tokens and returns everything up to them; `position` moves once all layers are done."""
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
        self.laplacian_heads = config.head_plan.per_layer[layer]
        self.q = Linear(config.width, config.width)
        self.k = Linear(config.width, config.groups * config.head_size)
        self.v = Linear(config.width, config.groups * config.head_size)
        self.out = Linear(config.width, config.width)

    def forward(self, x_BTC: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        B, T, _ = x_BTC.shape
        q_BTHD, k_BTGD, v_BTGD = (p(x_BTC).view(B, T, -1, self.head_size) for p in (self.q, self.k, self.v))
        q_BHTD = rms_norm(rotate(q_BTHD, rotary)).transpose(1, 2)
        k_BGSD = rms_norm(rotate(k_BTGD, rotary)).transpose(1, 2)
        v_BGSD = v_BTGD.transpose(1, 2)
        mask, current_v = None, None
        if cache is not None:
            # Of rows of unequal length the last of the S values is not the current token's.
            mask, current_v = cache.mask, None if cache.mask is None else v_BGSD
            k_BGSD, v_BGSD = cache.insert(self.layer, k_BGSD, v_BGSD)
        y_BHTD = laplacian_attention(
            q_BHTD, k_BGSD, v_BGSD, self.laplacian_heads, causal=mask is None, mask=mask, current_v_BGTD=current_v
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1))


def rotate(x_BTHD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns channel pairs (i, i + D/2) by -theta."""
    cos_T1D, sin_T1D = rotary
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat([a * cos_T1D + b * sin_T1D, b * cos_T1D - a * sin_T1D], dim=-1).to(x_BTHD.dtype)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(relu_squared(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config.width)

    def forward(self, x_BTC: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        x_BTC = x_BTC + self.attn(rms_norm(x_BTC), rotary, cache)
        return x_BTC + self.mlp(rms_norm(x_BTC))


class GPT(nn.Module):
    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self._compiled_hidden: Callable[[Tensor], Tensor] | None = None
        self._compiles_loss = False
        self.embed = Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.head = Linear(config.width, config.vocab)
        for name in ("cos_PD", "sin_PD"):
            table = torch.empty(config.positions, config.head_size // 2)
            self.register_buffer(name, table, persistent=False)
        if self.embed.weight.device.type != "meta":
            self.initialise()

    def materialise(self) -> "GPT":
        """Gives a model built on the meta device its storage on the CPU. `to_empty` does so too, but imports sympy."""
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="cpu")))
            for name, table in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(table.shape, dtype=table.dtype, device="cpu"))
        return self

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Sets every weight and table; needed after a model built on the meta device was given storage."""
        for name, weight in self.named_parameters():
            if name == "embed.weight":
                nn.init.normal_(weight, generator=generator)
            elif name.endswith(("attn.out.weight", "mlp.down.weight", "head.weight")):
                nn.init.zeros_(weight)
            else:
                outputs, inputs = weight.shape
                std = inputs**-0.5 * min(1.0, (outputs / inputs) ** 0.5)
                nn.init.normal_(weight, std=std, generator=generator)
        self.fill_rotary_tables()

    def fill_rotary_tables(self) -> None:
        device, half = self.cos_PD.device, self.config.head_size // 2
        frequencies = self.config.rotary_base ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
        angles_PD = torch.arange(self.config.positions, dtype=torch.float32, device=device)[:, None] * frequencies
        dtype = torch.bfloat16 if self.config.rotary_precision == "bf16" else torch.float32
        self.cos_PD, self.sin_PD = angles_PD.cos().to(dtype), angles_PD.sin().to(dtype)

    def use_bf16(self) -> "GPT":
        """Compute in bf16: the embedding and, with it, the whole stream; the other weights stay float32."""
        self.embed.to(torch.bfloat16)
        return self

    def use_compile(self, *, any_length: bool = False) -> "GPT":
        """Compile training: the blocks, and the elementwise part of the loss. Evaluation has too many shapes for it.

        `any_length`: sequences have another length in each batch, so one graph of the blocks serves them all.
        """
        self._compiled_hidden = compiled(self.hidden, any_length=any_length)
        self._compiles_loss = not any_length
        return self

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """The normalised output of the last block, B x T x C."""
        T = tokens_BT.shape[1]
        first = 0 if cache is None else cache.position
        if first + T > self.config.positions:
            raise ValueError(f"positions end at {self.config.positions}, cannot place token {first + T}")
        places = slice(0, T) if cache is None else cache.positions(T)
        rotary = self.cos_PD[places].unsqueeze(-2), self.sin_PD[places].unsqueeze(-2)
        x_BTC = rms_norm(self.embed(tokens_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC, rotary, cache)
        if cache is not None:
            cache.advance(T)
        return rms_norm(x_BTC)

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Soft-capped logits, B x T x V, in float32 (float64 for a float64 model)."""
        return self.logits(self.hidden(tokens_BT, cache))

    def logits(self, x: Tensor) -> Tensor:
        """Of any outputs of `hidden`."""
        logits = self.head(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return self.config.softcap * torch.tanh(logits / self.config.softcap)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Cross entropy over the targets that are not -1, without ever holding all logits.

        `none` gives B x T losses without gradients.
        """
        hidden = self._compiled_hidden if torch.is_grad_enabled() else None
        x_NC = (hidden or self.hidden)(tokens_BT).flatten(0, 1)
        loss = softcapped_cross_entropy(
            x_NC, self.head.weight, targets_BT.flatten(), self.config.softcap, reduction, self._compiles_loss
        )
        return loss.view(targets_BT.shape) if reduction == "none" else loss

    def flops_per_token(self) -> int:
        """Of forward and backward at the training context: 6 a weight of a matrix product, 12 L C T of attention."""
        matrices = sum(p.numel() for p in self.parameters()) - self.embed.weight.numel()
        return 6 * matrices + 12 * self.config.layers * self.config.width * self.config.context
