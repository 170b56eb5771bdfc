"""Loads an exported folder with only the target library; a separate program that imports nothing of `lapcli`.

    python reload.py FORMAT FOLDER QUESTIONS ANSWERS

QUESTIONS is a safetensors file of inputs with a JSON of settings in its metadata; ANSWERS gets the outputs in the same
form. `lapcli/export/verification.py` writes the questions and compares the answers. One exception: a timm folder of a
Laplacian ViT names an architecture that `import lapcli.timm` registers.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def main() -> None:
    form, folder, asked, answered = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    with safe_open(asked, framework="pt") as file:
        settings = json.loads((file.metadata() or {})["settings"])
    answer = {"hf": _hf, "timm": _timm, "safetensors": _safetensors}[form]
    tensors, facts = answer(folder, load_file(asked), settings)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, answered, metadata={"facts": json.dumps(facts)}
    )


@torch.inference_mode()
def _hf(folder: Path, inputs: dict[str, Tensor], settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    prompts = [row[:length] for row, length in zip(inputs["prompts"], settings["lengths"], strict=True)]
    longest = max(settings["lengths"])
    padded = torch.full((len(prompts), longest), tokenizer.pad_token_id)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts):  # padded on the left, as generation needs it
        padded[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    # `generate` derives the positions from the mask; a bare forward would count the padding.
    logits_of_padded = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    tensors = {"logits": model(inputs["tokens"]).logits}
    for row, prompt in enumerate(prompts):
        tensors[f"padded_{row}"] = logits_of_padded[row, longest - len(prompt) :].clone()
    asked = [{"role": "user", "content": settings["question"]}]
    template = tokenizer.apply_chat_template(asked, tokenize=True, add_generation_prompt=True, return_dict=True)
    text = tokenizer(settings["question"])["input_ids"]
    facts = {"template": template["input_ids"], "text": text, "class": type(model).__name__}
    return tensors, facts


@torch.inference_mode()
def _timm(
    folder: Path, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    import timm

    if settings["needs_lapcli"]:
        import lapcli.timm  # noqa: F401  registers the architecture
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = inputs["images"]
    config = timm.data.resolve_model_data_config(model)
    facts = {key: config[key] for key in ("input_size", "mean", "std", "crop_pct", "interpolation")}
    return {"outputs": model(images), "fewer": model(images[:3])}, {"data": facts, "class": type(model).__name__}


def _safetensors(
    folder: Path, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = load_file(folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        plan = (file.metadata() or {})["laplacian_heads"]
    digests = {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {}, {"sha256": digests, "plan": plan, **{name: config[name] for name in ("model", "laplacian_heads")}}


if __name__ == "__main__":
    main()
