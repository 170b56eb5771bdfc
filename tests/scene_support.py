"""Small scenes in ADE20K's layout: patches of flat colour, each colour a class."""

from pathlib import Path

import numpy as np
from PIL import Image

#: Label in the file -> colour. Label 0 means unlabelled.
COLOURS = {0: (0, 0, 0), 1: (230, 40, 40), 2: (40, 210, 50), 3: (40, 60, 220), 150: (230, 220, 40)}


def scene(seed: int, size: tuple[int, int] = (24, 16), block: int = 4) -> tuple[Image.Image, np.ndarray]:
    """A photograph of `size` (width, height) in blocks of one class, and its label map as stored in a file."""
    generator = np.random.default_rng(seed)
    rows, columns = -(-size[1] // block), -(-size[0] // block)
    labels = generator.choice(list(COLOURS), size=(rows, columns)).repeat(block, 0).repeat(block, 1)
    labels = labels[: size[1], : size[0]].astype(np.uint8)
    palette = np.zeros((256, 3), dtype=np.uint8)
    for label, colour in COLOURS.items():
        palette[label] = colour
    return Image.fromarray(palette[labels]), labels


def write_scenes(root: Path, training: int = 8, validation: int = 3, size: tuple[int, int] = (24, 16)) -> Path:
    for part, count, first in (("training", training, 0), ("validation", validation, 1000)):
        for kind in ("images", "annotations"):
            (root / kind / part).mkdir(parents=True)
        for number in range(count):
            image, labels = scene(first + number, size)
            image.save(root / "images" / part / f"{number:04d}.png")
            Image.fromarray(labels).save(root / "annotations" / part / f"{number:04d}.png")
    return root
