"""A tiny self-supervised recipe on the photographs, for the tests."""

from functools import cache
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
    "validation": {"every": 4, "images": 20, "neighbours": 5, "batch": 20},
    "checkpoint": {"every": 3, "keep": 3},
}

# Both groups of a batch in one forward, and no randomness that depends on the rank.
WHOLE: dict[str, Any] = {"train": {"batch": 8, "micro_batch": 8, "group": 4}, "model": {"drop_path": 0.0}}


def dino_recipe(**sections: Any):
    """The tiny recipe with some keys replaced; nested sections are merged too."""
    from image_support import _merged

    from lapcli.recipe import recipe_from_dict

    return recipe_from_dict(_merged(TINY_CROPS, sections))


def objective(recipe: Any, rank: int = 0, size: int = 1) -> Any:
    """The objective as built on that rank of `size` processes."""
    import torch
    from support import built

    from lapcli.objectives.self_supervised import SelfSupervised
    from lapcli.runtime.ranks import World

    return built(SelfSupervised, recipe, _photographs(), World(rank, size, torch.device("cpu")))


@cache
def _photographs() -> Any:
    """Opened once for all tests."""
    from lapcli.data.images.sources import open_images

    return open_images(dino_recipe().data, None)


def pillow_transforms(source: Any) -> list[Any]:
    """The crops made by torchvision's own transforms of Pillow images: first global, second global, local."""
    from torchvision import transforms as T

    crops = source.crops
    blurs = {"executed": (0.0, 0.9, 0.5), "documented": (1.0, 0.1, 0.5)}[crops.blur]
    shapes = [(crops.global_size, crops.global_scale)] * 2 + [(crops.local_size, crops.local_scale)]
    return [
        T.Compose(
            [
                T.RandomResizedCrop(size, scale, interpolation=T.InterpolationMode(source.interpolation)),
                T.RandomHorizontalFlip(0.5),
                T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
                T.RandomGrayscale(0.2),
                T.RandomApply([T.GaussianBlur(9, (0.1, 2.0))], blur),
                *([T.RandomSolarize(128, 0.2)] if number == 1 else []),
                T.PILToTensor(),
            ]
        )
        for number, ((size, scale), blur) in enumerate(zip(shapes, blurs, strict=True))
    ]
