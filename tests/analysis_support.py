"""Tiny models for the tests of the analyses, every weight drawn: where outputs are zero, heads would add nothing."""

from typing import Any

import timm
import torch

import lapcli
from lapcli.models.gpt import GPT, GPTConfig


def gpt(laplacian_heads, kv_heads=None, operators=None):
    torch.manual_seed(0)
    config = GPTConfig(
        layers=2,
        heads=4,
        kv_heads=kv_heads,
        width=16,
        vocab=11,
        context=8,
        laplacian_heads=laplacian_heads,
        operators=operators,
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model, torch.randint(11, (2, 8))


def vit(laplacian_heads, name="deit3_base_patch16_224", **options: Any):
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return lapcli.laplacianize(model.eval(), laplacian_heads), torch.randn(2, 3, 8, 8)


def dino(laplacian_heads, operators=None):
    from lapcli.models.dino_vit import DinoViT
    from lapcli.recipe.dino import DinoModel

    torch.manual_seed(0)
    model = DinoViT(
        DinoModel(layers=2, width=16, heads=4, patch=4, laplacian_heads=laplacian_heads, operators=operators)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval(), torch.randn(2, 3, 8, 12)


TINY_SELF_SUPERVISED: dict[str, Any] = {
    "objective": "self_supervised",
    "model": {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "patch": 4,
        "laplacian_heads": 2,
        "layer_scale": 0.5,
        "head": {"hidden": 16, "bottleneck": 8, "dino_prototypes": 16, "ibot_prototypes": 16},
    },
    "data": {"train": "builtin:photographs", "crops": {"global_size": 16, "locals": 2, "local_size": 8}},
    "train": {"steps": 4, "batch": 8, "micro_batch": 8, "group": 8, "threads": 1},
    "optimizer": {"lr": 1e-3},
    "schedule": {"epoch_steps": 1, "warmup_epochs": 1, "teacher_warmup_epochs": 2},
    "validation": {"every": 2, "neighbours": 5, "train_images": 50, "images": 30, "batch": 50},
    "checkpoint": {"every": 4, "keep": 1},
}


def self_supervised_recipe(**sections: Any):
    """A tiny self-supervised recipe with some keys of some sections replaced."""
    from lapcli.recipe import recipe_from_dict

    given = {
        name: {**value, **sections.get(name, {})} if isinstance(value, dict) else value
        for name, value in TINY_SELF_SUPERVISED.items()
    }
    return recipe_from_dict(given)
