"""A tiny self-supervised recipe on the photographs, for the tests."""

from typing import Any

TINY_CROPS: dict[str, Any] = {
    "objective": "self_supervised",
    "model": {
        "layers": 2,
        "width": 16,
        "heads": 2,
        "patch": 4,
        "laplacian_heads": 1,
        "drop_path": 0.3,
        "layer_scale": 0.5,
        "head": {"hidden": 16, "bottleneck": 8, "dino_prototypes": 32, "ibot_prototypes": 24},
    },
    "data": {"train": "builtin:photographs", "crops": {"global_size": 16, "locals": 2, "local_size": 8}},
    "train": {"steps": 6, "batch": 8, "micro_batch": 4, "group": 4, "threads": 1},
    "optimizer": {"lr": 1e-2},
    "schedule": {
        "epoch_steps": 2,
        "warmup_epochs": 1,
        "teacher_warmup_epochs": 2,
        "teacher_momentum": [0.9, 1.0],
        "frozen_epochs": 1,
    },
    "validation": {"every": 4, "train_images": 40, "images": 20, "neighbours": 5, "batch": 20},
    "checkpoint": {"every": 3, "keep": 3},
}


def dino_recipe(**sections: Any):
    """The tiny recipe with some keys of some sections replaced; sections within sections are merged too."""
    from image_support import _merged

    from lapcli.recipe import recipe_from_dict

    return recipe_from_dict(_merged(TINY_CROPS, sections))


def objective(recipe: Any, rank: int = 0, size: int = 1) -> Any:
    """As that rank of so many processes would build it."""
    import torch

    from lapcli.data.images import open_images
    from lapcli.objectives.self_supervised import SelfSupervised
    from lapcli.training.distributed import World

    return SelfSupervised(recipe, open_images(recipe.data, None), World(rank, size, torch.device("cpu")))
