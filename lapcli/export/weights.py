"""The weights of an exported folder: cast, checked and saved; and the format `safetensors`, which needs little else."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lapcli.heads.plan import HeadPlan
from lapcli.objectives.objective import LoadedModel
from lapcli.recipe import recipe_to_dict
from lapcli.runs import TOKENIZER
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_text

WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExportedModel:
    """A run's model to export: its weights have been rounded to `dtype`, and it computes in float32."""

    loaded: LoadedModel
    plan: HeadPlan
    dtype: str

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


def round_weights(model: nn.Module, dtype: str) -> None:
    """Round every weight to `dtype` and keep it as float32; UsageError if a value does not fit."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            rounded = weight.to(DTYPES[dtype])
            if not torch.isfinite(rounded).all():
                largest = float(weight.abs().max())
                raise UsageError(
                    f"{name} has values up to {largest:.3g}, which {dtype} cannot hold; use --dtype bf16 or float32"
                )
            weight.data = rounded.float()


def save_weights(exported: ExportedModel, tensors: Mapping[str, Tensor], path: Path) -> None:
    # safetensors saves neither tensors that share memory nor ones that are not contiguous.
    plain = {
        name: tensor.detach().to(DTYPES[exported.dtype]).cpu().contiguous().clone() for name, tensor in tensors.items()
    }
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
        "dtype": exported.dtype,
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
