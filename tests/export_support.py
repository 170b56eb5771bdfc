"""Finished runs with random weights to export, as left by training."""

from pathlib import Path
from typing import Any

import torch
from dino_support import dino_recipe
from harness_support import make_run
from image_support import image_recipe

from lapcli import checkpoint
from lapcli.export.formats import WEIGHTS, ExportedModel
from lapcli.runs import Run, open_run, read_run


def gpt_run(runs: Path, *, chat: bool = True, name: str = "gpt", **model: Any) -> Run:
    """Two layers, four heads that share two keys and values, one of them Laplacian by default."""
    shape = {"heads": 4, "kv_heads": 2, **model}
    return make_run(runs, "chat" if chat else "language_model", name=name, **shape)


def vit_run(runs: Path, *, name: str = "vit", data: dict[str, Any] | None = None, **model: Any) -> Run:
    from lapcli.models.vit import build_vit

    recipe = image_recipe(model=model, data=data or {})
    module = build_vit(recipe.model, 0)
    _draw(module, 0.1)
    return _finished(runs, name, recipe, module, {"classes": [f"digit {n}" for n in range(10)]})


def dino_run(runs: Path, *, name: str = "dino", **model: Any) -> Run:
    from lapcli.models.dino_vit import StudentTeacher

    recipe = dino_recipe(model=model)
    module = StudentTeacher(recipe.model, 0)
    _draw(module, 0.1)
    return _finished(runs, name, recipe, module, {})


def _draw(module: torch.nn.Module, deviation: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            scale = 1.0 if name == "embed.weight" else deviation
            p.copy_(torch.randn(p.shape, generator=generator) * scale + (1.0 if "norm" in name else 0.0))


def _finished(runs: Path, name: str, recipe: Any, module: torch.nn.Module, info: dict[str, Any]) -> Run:
    runs.mkdir(parents=True, exist_ok=True)
    run = open_run(runs, name, recipe)
    metadata = {"laplacian_heads": str(recipe.model.head_plan())}
    saved = checkpoint.save(run.checkpoints, 1, module.state_dict(), {"x": torch.zeros(1)}, metadata, {}, keep=1)
    run.update(status="finished", step=1, weights_sha256=saved.weights_sha256, **info)
    return read_run(run.path)


def write_and_shift(write: Any, exported: ExportedModel, folder: Path) -> None:
    """A valid folder, then the same folder with one damaged tensor."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    write(exported, folder)
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith(("q_proj.weight", "head.weight")))
    save_file({**tensors, name: tensors[name] + 0.1}, folder / WEIGHTS, metadata=metadata)
