"""Loads an exported folder in a separate process, with only the target library, and compares it with the run.

Both sides compute in float32.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lapcli.data.chat.conversation import question_and_answer, render_prompt
from lapcli.export.formats import ExportedModel
from lapcli.heads.plan import head_plan
from lapcli.runtime.errors import LapError

# For small models, correct folders differ by less than 1e-5, plain attention in place of Laplacian heads by over 0.5.
TOLERANCE = 1e-4
LIBRARIES = {"hf": "transformers", "timm": "timm", "safetensors": "safetensors"}
QUESTION = "Zwölf  Boxkämpfer\r\n\t1234: what is 3 + 4?"


@dataclass(frozen=True)
class Comparison:
    """One comparison: `difference` is the largest between numbers, or 0 for equal things and 1 for unequal ones."""

    name: str
    difference: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE


def verify(form: str, exported: ExportedModel, folder: Path) -> list[Comparison]:
    return {"hf": _verify_hf, "timm": _verify_timm, "safetensors": _verify_safetensors}[form](exported, folder)


def _reload(
    form: str, folder: Path, inputs: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run reload.py on the folder; return the tensors and facts from the target library."""
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "questions.safetensors", Path(place) / "answers.safetensors"
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in inputs.items()}
        save_file(tensors, asked, {"settings": json.dumps(settings)})
        script = Path(__file__).with_name("reload.py")
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",  # the folder alone has to be enough
            "HF_MODULES_CACHE": str(Path(place) / "modules"),  # transformers copies a folder's code there
            "TOKENIZERS_PARALLELISM": "false",
        }
        # -P: the script's folder is not searched for modules.
        command = [sys.executable, "-P", str(script), form, str(folder), str(asked), str(answered)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0 or not answered.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise LapError(f"{LIBRARIES[form]} cannot load the exported folder ({last[:300]})")
        with safe_open(answered, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
        return {name: value.clone() for name, value in load_file(answered).items()}, facts


@torch.inference_mode()
def _verify_hf(exported: ExportedModel, folder: Path) -> list[Comparison]:
    model, tokenizer = exported.loaded.language_model()
    context = model.config.context
    longest = min(24, context)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab, (4, min(32, context)), generator=generator)
    lengths = [longest, longest // 2, max(longest // 4, 1), longest - 1]
    prompts = torch.randint(model.config.vocab - 9, (4, longest), generator=generator)  # no special tokens
    settings = {"lengths": lengths, "question": QUESTION}
    outputs, facts = _reload("hf", folder, {"tokens": tokens, "prompts": prompts}, settings)
    rows = [row[:length] for row, length in zip(prompts, lengths, strict=True)]
    padded = max(_difference(outputs[f"padded_{n}"], model(row[None])[0]) for n, row in enumerate(rows))
    checks = [
        Comparison("logits", _difference(outputs["logits"], model(tokens)), facts["class"]),
        Comparison("logits of a padded batch", padded),
    ]
    question = question_and_answer(QUESTION)[:1]
    checks.append(Comparison("chat template", float(facts["template"] != render_prompt(question, tokenizer))))
    checks.append(Comparison("tokenizer", float(facts["text"] != [tokenizer.bos, *tokenizer.encode(QUESTION)])))
    return checks


@torch.inference_mode()
def _verify_timm(exported: ExportedModel, folder: Path) -> list[Comparison]:
    images = _images(exported)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    needs_lapcli = str(config["architecture"]).startswith("lap_")
    outputs, facts = _reload("timm", folder, {"images": images}, {"needs_lapcli": needs_lapcli})
    expected = exported.module(images)
    source = exported.loaded.images
    assert source is not None
    wanted = [list(source.mean), list(source.std), source.crop_ratio, source.interpolation]
    loaded = [
        list(facts["data"]["mean"]),
        list(facts["data"]["std"]),
        *(facts["data"][k] for k in ("crop_pct", "interpolation")),
    ]
    return [
        Comparison("outputs of 4 images", _difference(outputs["outputs"], expected), facts["class"]),
        Comparison("outputs of 3 images", _difference(outputs["fewer"], expected[:3])),
        Comparison("preprocessing", float(loaded != wanted), f"crop {source.crop_ratio:g}, {source.interpolation}"),
    ]


def _verify_safetensors(exported: ExportedModel, folder: Path) -> list[Comparison]:
    _, facts = _reload("safetensors", folder, {}, {})
    expected = {
        name: hashlib.sha256(value.detach().float().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in exported.module.state_dict().items()
    }
    plan, model = exported.plan, facts["model"]
    spec = model.get("operators") or model["laplacian_heads"]
    written = [facts["laplacian_heads"], facts["plan"], str(head_plan(spec, len(plan.per_layer), plan.heads))]
    return [
        Comparison("tensors", float(facts["sha256"] != expected), f"{len(expected)} tensors"),
        Comparison("head plan", float(written != [list(plan.per_layer), str(plan), str(plan)]), plan.label()),
    ]


def _images(exported: ExportedModel) -> Tensor:
    size = exported.loaded.image_size
    assert size is not None
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; infinite if the shapes differ or a value is NaN."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.float() - b.float()).abs().nan_to_num(nan=float("inf")).max())
