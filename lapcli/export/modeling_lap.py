"""The GPT of "Laplacian Heads Improve Transformers" for transformers 5, as one file beside its weights.

    attention head    y_h = P_h v_h
    Laplacian head    y_h = v_h - P_h v_h      (the last `laplacian_heads[layer]` heads of a layer)

    x = norm(embed(tokens))
    each block:  x = x + out(attention(norm(x)));  x = x + down(relu(up(norm(x)))^2)
    logits = softcap * tanh(head(norm(x)) / softcap)

A Laplacian head subtracts from the values of the *current* tokens. They are taken before the cache is updated, because
a static cache returns its full buffer, whose last rows are not the current tokens. The subtraction is outside the
attention function, so that sdpa, eager, flash and flex attention all work.

Shapes: B batch, T tokens, C width, H heads, G key and value heads, D head size, S tokens in the cache, V vocabulary.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class LapConfig(PretrainedConfig):
    """`laplacian_heads` has one number per layer; it changes the result but no shape, so it has no default."""

    model_type = "lap_gpt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 265,
        hidden_size: int = 32,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 1,
        num_key_value_heads: int | None = None,
        max_position_embeddings: int = 2048,
        laplacian_heads: list[int] | None = None,
        rotary_base: float | None = 10_000.0,
        rotary_precision: str = "float32",
        final_logit_softcapping: float = 15.0,
        use_cache: bool = True,
        **options: object,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.laplacian_heads = laplacian_heads
        self.rotary_base = rotary_base
        self.rotary_precision = rotary_precision
        self.final_logit_softcapping = final_logit_softcapping
        self.use_cache = use_cache
        options.setdefault("tie_word_embeddings", False)
        super().__init__(**options)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + D/2) by -theta."""
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1).to(x_BTHD.dtype)


def eager_attention(
    module: "LapAttention",
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, Tensor]:
    k_BHSD = k_BGSD.repeat_interleave(module.num_key_value_groups, dim=1)
    v_BHSD = v_BGSD.repeat_interleave(module.num_key_value_groups, dim=1)
    logits_BHTS = q_BHTD @ k_BHSD.transpose(2, 3) * scaling
    if mask is not None:
        logits_BHTS = logits_BHTS + mask
    p_BHTS = logits_BHTS.softmax(-1, dtype=torch.float32).to(q_BHTD.dtype)
    return (p_BHTS @ v_BHSD).transpose(1, 2), p_BHTS


class LapAttention(nn.Module):
    is_causal = True

    def __init__(self, config: LapConfig, layer_idx: int) -> None:
        super().__init__()
        if config.laplacian_heads is None or len(config.laplacian_heads) != config.num_hidden_layers:
            raise ValueError("config.json must have laplacian_heads with one number for each layer")
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.first = config.num_attention_heads - config.laplacian_heads[layer_idx]  # Laplacian head
        groups = config.num_key_value_heads * config.head_dim
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k = nn.Linear(config.hidden_size, groups, bias=False)
        self.v = nn.Linear(config.hidden_size, groups, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x_BTC: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, past: Cache | None, **options: object
    ) -> Tensor:
        B, T, _ = x_BTC.shape
        q_BTHD, k_BTGD, current_v_BTGD = (p(x_BTC).view(B, T, -1, self.head_dim) for p in (self.q, self.k, self.v))
        q_BHTD = rms_norm(rotate(q_BTHD, *rotary)).transpose(1, 2)
        k_BGSD = rms_norm(rotate(k_BTGD, *rotary)).transpose(1, 2)
        v_BGSD = current_v_BTGD.transpose(1, 2)
        if past is not None:
            k_BGSD, v_BGSD = past.update(k_BGSD, v_BGSD, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        y_BTHD, _ = attention(self, q_BHTD, k_BGSD, v_BGSD, mask, dropout=0.0, scaling=self.scaling, **options)
        if self.first < y_BTHD.shape[2]:
            own_BTHD = current_v_BTGD.repeat_interleave(self.num_key_value_groups, dim=2)
            difference = own_BTHD[:, :, self.first :] - y_BTHD[:, :, self.first :]
            y_BTHD = torch.cat([y_BTHD[:, :, : self.first], difference], dim=2)
        return self.out(y_BTHD.reshape(B, T, -1))


class LapMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class LapBlock(nn.Module):
    def __init__(self, config: LapConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn = LapAttention(config, layer_idx)
        self.mlp = LapMLP(config.hidden_size)

    def forward(
        self, x_BTC: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, past: Cache | None, **options: object
    ) -> Tensor:
        x_BTC = x_BTC + self.attn(rms_norm(x_BTC), rotary, mask, past, **options)
        return x_BTC + self.mlp(rms_norm(x_BTC))


class LapForCausalLM(PreTrainedModel, GenerationMixin):
    """The names of its weights are those of `lap`; no other transformers class uses them, so none can load them."""

    config_class = LapConfig
    _input_embed_layer = "embed"
    _no_split_modules: ClassVar[list[str]] = ["LapBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: LapConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(LapBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    # transformers looks for `lm_head`; this model keeps the names of `lap`.
    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings

    def _rotary(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Computed at each call: a table is not part of the weights, and a model built on `meta` would lose it."""
        half = self.config.head_dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions_BT.device)
        base = self.config.rotary_base
        frequencies = torch.zeros_like(steps) if base is None else base ** (-steps / half)
        angles_BTD = positions_BT[..., None].float() * frequencies
        dtype = torch.bfloat16 if self.config.rotary_precision == "bf16" else torch.float32
        return angles_BTD.cos().to(dtype).unsqueeze(-2), angles_BTD.sin().to(dtype).unsqueeze(-2)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **options: object,
    ) -> CausalLMOutputWithPast | tuple:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        embedded_BTC = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        uses_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if uses_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(embedded_BTC.shape[1], device=embedded_BTC.device)[None] + seen
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded_BTC,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        rotary = self._rotary(position_ids)
        x_BTC = rms_norm(embedded_BTC)
        hidden = [x_BTC]
        # For the loss only: the remaining `options` are passed down to the attention function.
        loss_options = {key: options.pop(key) for key in ("num_items_in_batch",) if key in options}
        for block in self.blocks:
            x_BTC = block(x_BTC, rotary, mask, past_key_values, **options)
            hidden.append(x_BTC)
        x_BTC = rms_norm(x_BTC)
        # 0 keeps all tokens, since slice(-0, None) is the full sequence.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        # float32 before the soft cap, as in training.
        logits_BTV = self.head(x_BTC[:, kept]).float()
        cap = self.config.final_logit_softcapping
        logits_BTV = cap * torch.tanh(logits_BTV / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, self.config.vocab_size, **loss_options)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=past_key_values if uses_cache else None,
            # The last state is after the norm, as in transformers' own models.
            hidden_states=(*hidden[:-1], x_BTC) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output
