"""Small image sources for the tests: folders, parquet files with the hub's columns, and a tiny recipe on the digits."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TINY_IMAGES: dict[str, Any] = {
    "objective": "classification",
    "model": {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "image": 8,
        "patch": 2,
        "classes": 10,
        "laplacian_heads": 2,
        "drop_path": 0.2,
        "layer_scale": 1.0,
    },
    "data": {
        "train": "builtin",
        "validation": 0.2,
        "augmentation": {"crop": "padded", "policy": "rand-m9-mstd0.5-inc1"},
        "mixing": {"mixup": 0.8, "cutmix": 1.0, "group": 8},
    },
    "train": {"steps": 10, "batch": 16, "micro_batch": 8, "threads": 1},
    "optimizer": {"name": "lamb", "lr": 3e-3, "weight_decay": 0.02},
    "schedule": {"warmup_epochs": 0.02, "start_lr": 1e-3},
    "validation": {"every": 4, "batch": 100},
    "checkpoint": {"every": 3, "keep": 3},
}


def image_recipe(**sections: Any):
    """The tiny recipe with some keys replaced; nested sections are merged too."""
    from lapcli.recipe import recipe_from_dict

    return recipe_from_dict(_merged(TINY_IMAGES, sections))


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def picture(seed: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def write_folder(root: Path, parts: dict[str, dict[str, int]]) -> Path:
    """`{"train": {"cat": 3}}`: three images in train/cat."""
    seed = 0
    for part, classes in parts.items():
        for name, count in classes.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                seed += 1
                picture(seed).save(root / part / name / f"{number}.png")
    return root


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path
