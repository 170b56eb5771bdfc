"""The format `hf`: a GPT as a folder that transformers 5 loads, with tokenizer, chat template and stop tokens.

Without Laplacian heads and with float32 rotary tables it is transformers' own `nanochat`. Any other model comes with
its modelling file (`modeling_lap.py`, loaded with `trust_remote_code=True`): under the name `nanochat` its weights
would load silently and compute plain attention.
"""

import json
from pathlib import Path
from typing import Any

import torch

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.export.weights import WEIGHTS, ExportedModel, save_weights, write_json
from lapcli.models.gpt import GPT, GPTConfig, to_transformers
from lapcli.runs import TOKENIZER
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_bytes, write_text

MODELING = "modeling_lap.py"
BOS, END = "<|bos|>", "<|assistant_end|>"
PAD = "<|output_end|>"  # never a target, so that a collator that masks the padding masks nothing that is learned
_DTYPES = {"float32": "float32", "bf16": "bfloat16", "float16": "float16"}

#: Renders the same ids as `data/chat/conversation.py`: nothing stands between the special tokens and the texts.
CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- if messages and messages[0]['role'] == 'system' -%}
  {%- if messages | length < 2 or messages[1]['role'] != 'user' -%}
    {{- raise_exception('a system message needs a user message after it') -}}
  {%- endif -%}
  {%- set system = messages[0]['content'] + '\\n\\n' -%}
  {%- set turns = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}
  {%- set turns = messages -%}
{%- endif -%}
{%- for turn in turns -%}
  {%- if turn['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
    {{- raise_exception('turns alternate between user and assistant, the user first') -}}
  {%- endif -%}
  {{- '<|' + turn['role'] + '_start|>' -}}
  {%- if loop.first -%}{{- system -}}{%- endif -%}
  {%- if turn['content'] is string -%}
    {{- turn['content'] -}}
  {%- else -%}
    {%- for part in turn['content'] -%}
      {%- if part['type'] == 'python' -%}
        {{- '<|python_start|>' + part['text'] + '<|python_end|>' -}}
      {%- elif part['type'] == 'python_output' -%}
        {{- '<|output_start|>' + part['text'] + '<|output_end|>' -}}
      {%- else -%}
        {{- part['text'] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|' + turn['role'] + '_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""


def is_native(config: GPTConfig) -> bool:
    is_rotated = config.rotary_base is not None and config.rotary_precision == "float32"
    return config.head_plan().total == 0 and is_rotated


def write_hf(exported: ExportedModel, folder: Path) -> None:
    model, tokenizer = exported.loaded.language_model()
    if parts := model.config.added_parts:
        raise UsageError(f"no format supports {' and '.join(f'model.{part}' for part in parts)}; use the run itself")
    native = is_native(model.config)
    tensors = model.state_dict()
    if native:
        tensors = {to_transformers(name): tensor for name, tensor in tensors.items()}
    else:
        # Copied as it is: the modelling file must not import anything of lapcli.
        write_bytes(folder / MODELING, Path(__file__).with_name(MODELING).read_bytes())
    save_weights(exported, tensors, folder / WEIGHTS)
    write_json(folder / "config.json", _config(model, tokenizer, exported.dtype, native))
    is_chat = exported.recipe.objective == "chat"
    # Both: a chat turn ends with the first, a document of a base model with the second.
    ends = [tokenizer.special(name) for name in (END, BOS)]
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": tokenizer.bos, "eos_token_id": ends, "pad_token_id": tokenizer.special(PAD)},
    )
    _write_tokenizer(tokenizer, folder, model.config.context, END if is_chat else BOS)


def _config(model: GPT, tokenizer: Tokenizer, dtype: str, native: bool) -> dict[str, Any]:
    config = model.config
    if tokenizer.vocab_size != config.vocab:
        raise UsageError(f"the tokenizer has {tokenizer.vocab_size:,} tokens and the model {config.vocab:,}")
    shape: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "max_position_embeddings": config.context,
        "final_logit_softcapping": config.softcap,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": [tokenizer.special(name) for name in (END, BOS)],
        "pad_token_id": tokenizer.special(PAD),
        "dtype": _DTYPES[dtype],
    }
    if native:
        architecture = {
            "architectures": ["NanoChatForCausalLM"],
            "model_type": "nanochat",
            "intermediate_size": 4 * config.width,
            "hidden_act": "relu2",
            # F.rms_norm's own default in float32, which the run computes with; that of transformers is 1e-6.
            "rms_norm_eps": torch.finfo(torch.float32).eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        }
    else:
        module = MODELING.removesuffix(".py")
        architecture = {
            "architectures": ["LapForCausalLM"],
            "model_type": "lap_gpt",
            "auto_map": {"AutoConfig": f"{module}.LapConfig", "AutoModelForCausalLM": f"{module}.LapForCausalLM"},
            "laplacian_heads": list(config.head_plan().per_layer),
            "rotary_base": config.rotary_base,
            "rotary_precision": config.rotary_precision,
        }
    return {**architecture, **shape}


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int, eos: str) -> None:
    """Write our tokenizer with <|bos|> before every text, as in training, and the chat template."""
    tokenizer.save(folder / TOKENIZER)
    content = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    first = {"SpecialToken": {"id": BOS, "type_id": 0}}
    # Not applied by `apply_chat_template`, whose template writes <|bos|> itself.
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [tokenizer.bos], "tokens": [BOS]}},
    }
    write_text(folder / TOKENIZER, json.dumps(content, ensure_ascii=False))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": eos,
            "pad_token": PAD,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)
