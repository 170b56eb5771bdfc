"""Our GPT as a model of `transformers`, saved and loaded by it, so that lm-eval's own HFLM can run the same weights."""

from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from lapcli.data.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from lapcli.models.gpt import GPT, GPTConfig, KVCache


class LapConfig(PretrainedConfig):
    model_type = "lap_gpt"

    def __init__(self, gpt: dict[str, Any] | None = None, **options: Any) -> None:
        self.gpt = gpt or {"layers": 1, "heads": 1, "width": 2, "vocab": 2}
        self.num_hidden_layers = self.gpt["layers"]
        self.max_position_embeddings = self.gpt.get("context", 2048)
        self.vocab_size = self.gpt["vocab"]
        super().__init__(**options)


class _Cache(KVCache):
    """Keys and values are kept by `transformers`; rows may be padded on the left."""

    def __init__(self, past: DynamicCache, positions_BT: Tensor, mask_B1TS: Tensor | None) -> None:
        self.past, self.position, self.mask, self._positions_BT = past, past.get_seq_length(), mask_B1TS, positions_BT

    def positions(self, tokens: int) -> Tensor:
        return self._positions_BT

    def advance(self, tokens: int) -> None:
        pass

    def insert(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.past.update(k_BGTD, v_BGTD, layer)


class LapForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LapConfig
    _tied_weights_keys = None

    def __init__(self, config: LapConfig) -> None:
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**config.gpt))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, **_):
        if past_key_values is None and attention_mask is None:
            return CausalLMOutputWithPast(logits=self.gpt(input_ids))
        past = DynamicCache() if past_key_values is None else past_key_values
        T, S = input_ids.shape[1], past.get_seq_length() + input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(len(input_ids), S, dtype=torch.long)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -T:]
        mask = None
        if not attention_mask.all():  # padding sees itself: a row without anything to see is not a number
            allowed = torch.ones(T, S, dtype=torch.bool).tril(S - T) & attention_mask[:, None].bool()
            mask = (allowed | torch.eye(S, dtype=torch.bool)[-T:])[:, None]
        logits = self.gpt(input_ids, _Cache(past, positions, mask))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past)


def hf_tokenizer(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerFast:
    tokenizer.save(folder / "tokenizer.json")
    bos = "<|bos|>"
    found = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=bos,
        eos_token=bos,
        pad_token=bos,
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # a text that quotes a special token is text
    )
    found._tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos)])
    return found


def hflm(model: GPT, tokenizer: Tokenizer, folder: Path, batch: int = 4) -> HFLM:
    """Through a file of `transformers` own."""
    c = model.config
    shape = {"layers": c.layers, "heads": c.heads, "width": c.width, "vocab": c.vocab, "context": c.context}
    config = LapConfig(gpt={**shape, "laplacian_heads": list(c.head_plan().per_layer)})
    made = LapForCausalLM(config)
    made.gpt.load_state_dict(model.state_dict())
    made.save_pretrained(folder / "model")
    loaded = LapForCausalLM.from_pretrained(folder / "model").eval()
    loaded.gpt.fill_rotary_tables()  # no part of the file
    return HFLM(
        pretrained=loaded,
        tokenizer=hf_tokenizer(tokenizer, folder),
        backend="causal",
        max_length=c.context,
        batch_size=batch,
        add_bos_token=True,
    )
