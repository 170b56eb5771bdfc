"""The format `timm`: a ViT as a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

A classifier without Laplacian heads is a stock ViT. Any other folder names an architecture that only
`import lapcli.timm` registers: stock timm refuses it, while under a stock name it would load the weights into plain
attention.
"""

from pathlib import Path
from typing import Any

from lapcli.export.weights import WEIGHTS, ExportedModel, save_weights, write_json
from lapcli.models.dino_vit import DinoViT, to_timm
from lapcli.recipe.dino import DinoModel
from lapcli.recipe.vision import ViTModel
from lapcli.runtime.errors import UsageError


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
