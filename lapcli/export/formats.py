"""The writers of exported folders: `hf` (transformers), `timm` and `safetensors`.

hf      without Laplacian heads and with float32 rotary tables, a GPT is transformers' own `nanochat`. Any other model
        comes with its modelling file (`modeling_lap.py`, loaded with `trust_remote_code=True`): under the name
        `nanochat` its weights would load silently and compute plain attention.
timm    a classifier without Laplacian heads is a stock ViT. Any other folder names an architecture that only
        `import lapcli.timm` registers: stock timm refuses it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.heads.plan import HeadPlan
from lapcli.models.dino_vit import DinoViT, to_timm
from lapcli.models.gpt import GPT, GPTConfig, to_transformers
from lapcli.objectives.objective import LoadedModel
from lapcli.recipe import recipe_to_dict
from lapcli.recipe.dino import DinoModel
from lapcli.recipe.vision import ViTModel
from lapcli.runs import TOKENIZER
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_bytes, write_text

WEIGHTS = "model.safetensors"
MODELING = "modeling_lap.py"
BOS, END = "<|bos|>", "<|assistant_end|>"
PAD = "<|output_end|>"  # never a target, so that a collator that masks the padding masks nothing that is learned

#: Renders the same ids as `data/chat/conversation.py`: there is nothing between the special tokens and the texts.
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


@dataclass(frozen=True)
class ExportedModel:
    """A run's model to export, in float32."""

    loaded: LoadedModel
    plan: HeadPlan

    @property
    def module(self) -> nn.Module:
        return self.loaded.module

    @property
    def recipe(self) -> Any:
        assert self.loaded.run is not None
        return self.loaded.run.recipe

    def metadata(self) -> dict[str, str]:
        """Return the weights file's metadata; our loaders refuse to load it into a model with another head plan."""
        return {"laplacian_heads": str(self.plan), "source_sha256": str(self.loaded.weights_sha256)}


def save_weights(exported: ExportedModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    # safetensors cannot save tensors that share memory or are not contiguous.
    plain = {name: tensor.detach().float().contiguous().clone() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # of the umask; safetensors writes files of mode 0600, which a colleague could not read
    save_file(plain, path, metadata={"format": "pt", **exported.metadata()})
    path.chmod(mode)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_safetensors(exported: ExportedModel, folder: Path) -> None:
    """Write weights under our own names, the recipe's model section with the head plan, and a GPT's tokenizer."""
    save_weights(exported, exported.module.state_dict(), folder / WEIGHTS)
    values = recipe_to_dict(exported.recipe)
    config: dict[str, Any] = {
        "objective": exported.recipe.objective,
        "model": values["model"],
        "laplacian_heads": list(exported.plan.per_layer),
        "heads": exported.plan.heads,
        "dtype": "float32",
    }
    if exported.loaded.tokenizer is not None:
        config["vocab"] = exported.loaded.tokenizer.vocab_size
        exported.loaded.tokenizer.save(folder / TOKENIZER)
    if exported.loaded.images is not None:
        config["images"] = {
            "size": exported.loaded.image_size,
            **{name: getattr(exported.loaded.images, name) for name in ("mean", "std", "interpolation", "crop_ratio")},
        }
    write_json(folder / "config.json", config)


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
        # Copied unchanged: the modelling file must not import from lapcli.
        write_bytes(folder / MODELING, Path(__file__).with_name(MODELING).read_bytes())
    save_weights(exported, tensors, folder / WEIGHTS)
    write_json(folder / "config.json", _config(model, tokenizer, native))
    is_chat = exported.recipe.objective == "chat"
    # Both: a chat turn ends with the first, a base model's document with the second.
    ends = [tokenizer.special(name) for name in (END, BOS)]
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": tokenizer.bos, "eos_token_id": ends, "pad_token_id": tokenizer.special(PAD)},
    )
    _write_tokenizer(tokenizer, folder, model.config.context, END if is_chat else BOS)


def _config(model: GPT, tokenizer: Tokenizer, native: bool) -> dict[str, Any]:
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
        "dtype": "float32",
    }
    if native:
        architecture = {
            "architectures": ["NanoChatForCausalLM"],
            "model_type": "nanochat",
            "intermediate_size": 4 * config.width,
            "hidden_act": "relu2",
            # F.rms_norm's default in float32, which the run uses; transformers' default is 1e-6.
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


def write_timm(exported: ExportedModel, folder: Path) -> None:
    model: Any = exported.module
    tensors = model.state_dict()
    if isinstance(model, DinoViT):
        architecture, arguments = _backbone(exported.recipe.model, exported.loaded.image_size)
        tensors = to_timm(tensors)
    else:
        architecture, arguments = _classifier(exported.recipe.model, exported.plan.total == 0)
    if architecture.startswith("lap_"):
        arguments["laplacian_heads"] = list(exported.plan.per_layer)
    save_weights(exported, tensors, folder / WEIGHTS)
    classes = exported.loaded.classes or 0
    run = exported.loaded.run
    names = None if run is None else run.info.get("classes")
    config = {
        "architecture": architecture,
        "num_classes": classes,
        "num_features": exported.recipe.model.width,
        "global_pool": "token",
        "laplacian_heads": list(exported.plan.per_layer),
        "model_args": arguments,
        "pretrained_cfg": _pretrained(exported, architecture, classes),
    }
    if isinstance(names, list) and len(names) == classes:
        config["label_names"] = [str(name) for name in names]
    write_json(folder / "config.json", config)


def _classifier(section: ViTModel, is_plain: bool) -> tuple[str, dict[str, Any]]:
    arguments: dict[str, Any] = {
        "img_size": section.image,
        "patch_size": section.patch,
        "embed_dim": section.width,
        "depth": section.layers,
        "num_heads": section.heads,
        "mlp_ratio": section.mlp_ratio,
        "num_classes": section.classes,
        # DeiT-III: the class token has no position.
        "no_embed_class": True,
    }
    if section.layer_scale is not None:  # timm drops arguments that are null and uses its default, no layer scale
        arguments["init_values"] = section.layer_scale
    # Only a constructor: the arguments replace every size of this architecture.
    return "vit_base_patch16_224" if is_plain else "lap_vit", arguments


def _backbone(section: DinoModel, size: int | None) -> tuple[str, dict[str, Any]]:
    """Return the architecture's name and arguments. The name is ours even without Laplacian heads, because timm's
    config.json cannot express the epsilon of the norms."""
    if section.rope_precision != "float32":
        raise UsageError("timm computes rotary positions in float32, this run in bf16; use --to safetensors")
    return "lap_dino_vit", {
        "img_size": size,
        "patch_size": section.patch,
        "embed_dim": section.width,
        "depth": section.layers,
        "num_heads": section.heads,
        "mlp_ratio": section.mlp_ratio,
        "init_values": section.layer_scale,
        "rope_temperature": section.rope_base,
    }


def _pretrained(exported: ExportedModel, architecture: str, classes: int) -> dict[str, Any]:
    """Return the preprocessing of images, in timm's form; its defaults would be ImageNet's."""
    images, size = exported.loaded.images, exported.loaded.image_size
    assert images is not None
    return {
        "architecture": architecture,
        "custom_load": False,
        "input_size": [3, size, size],
        "fixed_input_size": True,
        "interpolation": images.interpolation,
        "crop_pct": images.crop_ratio,
        "crop_mode": "center",
        "mean": list(images.mean),
        "std": list(images.std),
        "num_classes": classes,
        "pool_size": None,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


WRITERS: dict[str, Callable[[ExportedModel, Path], None]] = {
    "hf": write_hf,
    "timm": write_timm,
    "safetensors": write_safetensors,
}
