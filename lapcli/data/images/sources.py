"""The images of a recipe: opening a source, holding images out, and checking both against the recipe.

The built-in images need no network: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, and its two photographs.
The latter, a temple and a flower, are cut into non-overlapping cells. A piece's class is the region of the photograph
that contains it; every second cell, as on a chessboard, is held out, so that held-out pieces share no pixels with
training pieces.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from lapcli.data.files import digest
from lapcli.data.images.image_set import (
    HELD_OUT,
    FolderImages,
    ImageSet,
    ImageSubset,
    has_tables,
    image_files,
    open_tables,
    sampled_sizes,
)
from lapcli.data.sources import LabelledImageSource
from lapcli.recipe.section import find_source
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.errors import DataError


@dataclass(frozen=True)
class ImageData:
    train: ImageSet
    validation: ImageSet
    description: str
    identity: str  # of both parts
    note: str | None = None  # about validation images of the source that are not used


def open_images(source: ImageFiles, classes: int | None) -> ImageData:
    """Open and check both parts; `classes` is the expected number, or None."""
    train, validation, note = _parts(source)
    if train.classes != validation.classes:
        differing = sorted(set(train.classes) ^ set(validation.classes))[:5]
        raise DataError(
            f"training and validation images have different classes: {', '.join(differing)} are in only one of them"
        )
    _check_count(train, classes, source)
    identity = digest(train.identity(), validation.identity())
    return ImageData(train, validation, _described(source, train, validation), identity, note)


#: Sizes that patches tile, from which a first recipe takes the largest that most images have.
_SIZES = (16, 32, 64, 96, 128)


def first_values(folder: Path) -> dict[str, str | None]:
    """Inspect an image folder; return suitable values of recipe keys, with None for keys that do not apply."""
    path = str(folder.expanduser().resolve())
    train, held_out = _open(ImageFiles(train=path), path)
    sizes = sampled_sizes(train)
    side = int(np.median(np.min(sizes, axis=1)))
    size = max((each for each in _SIZES if each <= side), default=_SIZES[0])
    count = len(train) if held_out is not None else int(0.9 * len(train))
    batch = 2 ** min(6, max(1, count).bit_length() - 1)
    return {
        "train": json.dumps(path, ensure_ascii=False),
        "batch": str(batch),
        "micro_batch": str(batch),
        "validation": "0.1   # of each class" if held_out is None else "null  # the folder's own held-out images",
        "image": str(size),
        "patch": f"{max(2, size // 8)}  # 64 patches and the class token",
        "classes": str(len(train.classes)),
        **dict.fromkeys(("mean", "std", "augmentation")),
    }


def open_held_out(source: ImageFiles, classes: list[str]) -> tuple[ImageSet, str]:
    """Open and describe the evaluation images of a model with those classes. No training image is read.

    A folder without splits is used completely.
    """
    train, validation, _ = _parts(source, whole=True)
    _check_count(validation, len(classes), source)
    # A table without class names has numbers instead, whose order may differ from the model's.
    are_named = validation.classes != [str(number) for number in range(len(validation.classes))]
    if are_named and validation.classes != classes:
        actual, expected = next(pair for pair in zip(validation.classes, classes, strict=True) if pair[0] != pair[1])
        raise DataError(
            f"{source.train} does not have the classes that the model was trained on, in their order: it has "
            f"{actual!r} instead of {expected!r}; name the folders like those of the training images"
        )
    return validation, _described(source, train, validation)


def _check_count(images: ImageSet, classes: int | None, source: ImageFiles) -> None:
    if classes is not None and len(images.classes) != classes:
        found = len(images.classes)
        raise DataError(
            f"the images of {source.train} have {found} classes, but model.classes is {classes}; make them equal"
        )


def _described(source: ImageFiles, train: ImageSet, validation: ImageSet) -> str:
    counts = f"{len(train):,} training and {len(validation):,} validation" if train is not validation else len(train)
    return f"{source.train}: {counts} images of {len(validation.classes)} classes"


def _parts(source: ImageFiles, whole: bool = False) -> tuple[ImageSet, ImageSet, str | None]:
    """Return the training and validation images, and a note about validation images that are not used."""
    train, own_validation = _open(source, source.train)
    note = _unused_folders(source)
    if isinstance(source.validation, str):
        # A folder of images per class, or a folder of tables with its own split.
        other, held_out = _open(source, source.validation)
        return train, held_out or other, note
    if isinstance(source.validation, float):
        if own_validation is not None:
            note = (
                f"the {len(own_validation):,} validation images of {source.train} are not used: data.validation holds "
                f"out {source.validation} of its training images; use them with --set data.validation=null"
            )
        return *held_out_fraction(train, source.validation, 0), note
    if own_validation is None and not whole:
        raise DataError(
            f"{source.train} has no part to validate on ({', '.join(HELD_OUT)}); give data.validation, a folder or a "
            "fraction such as 0.1"
        )
    return train, train if own_validation is None else own_validation, note


def _unused_folders(source: ImageFiles) -> str | None:
    """Return a note about folders of held-out images beside the training images that the recipe does not read."""
    folder = Path(source.train).expanduser().resolve()
    root = folder.parent if folder.name == "train" else folder
    there = [root / name for name in HELD_OUT if (root / name).is_dir() and (root / "train").is_dir()]
    if isinstance(source.validation, str):
        read = [Path(source.validation).expanduser().resolve()]
    else:
        read = there[:1] if source.validation is None else []  # as in `_open`
    unused = [str(each) for each in there if each not in read]
    return f"not used: {', '.join(unused)}; to validate on one of them, name it in data.validation" if unused else None


def _open(source: ImageFiles, where: str) -> tuple[ImageSet, ImageSet | None]:
    """Open the training part of a source, and its held-out part, if any."""
    if where == "builtin":
        return Digits(), None
    if where == "builtin:photographs":
        return Photographs(), Photographs(held_out=True)
    named = find_source(where, "images")
    if isinstance(named, LabelledImageSource):
        return named.images()
    if where.startswith("hub:"):
        return open_tables(where, source.revision, source.label_column)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}; give `builtin`, `builtin:photographs`, `hub:OWNER/NAME` or a folder"
        )
    # A folder of images per class, not of tables.
    if any(next(image_files(place), None) for place in (folder / "train").glob("[!.]*/")):
        held_out = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None)
        return FolderImages(folder / "train"), FolderImages(held_out) if held_out else None
    if has_tables(folder):
        return open_tables(str(folder), None, source.label_column)
    return FolderImages(folder), None


def held_out_fraction(images: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Hold out the same fraction of each class, at least one image, never all; a single image is not held out."""
    generator = np.random.default_rng([seed, len(images)])
    held_out = []
    for label in range(len(images.classes)):
        of_class = generator.permutation(np.flatnonzero(images.labels == label))
        held_out.append(of_class[: min(max(1, round(fraction * len(of_class))), len(of_class) - 1)])
    mask = np.zeros(len(images), dtype=bool)
    mask[np.concatenate(held_out)] = True
    if not mask.any():
        raise DataError(f"data.validation {fraction} holds nothing out: no class has two images; add some")
    return ImageSubset(images, np.flatnonzero(~mask)), ImageSubset(images, np.flatnonzero(mask))


class PixelImages(ImageSet):
    """Images that are arrays of pixels."""

    def __init__(self, pixels: Iterable[np.ndarray], labels: np.ndarray, classes: Sequence[str], name: str) -> None:
        super().__init__(labels, classes)
        self._pixels, self._name = [np.ascontiguousarray(image) for image in pixels], name

    def encoded(self, index: int) -> bytes:
        return self._pixels[index].tobytes()

    def name(self, index: int) -> str:
        return f"{self._name} {index}"

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])


class Digits(PixelImages):
    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # from 17 levels, 0 to 16
        rgb = np.broadcast_to(grey[..., None], (*grey.shape, 3))
        super().__init__(rgb, digits.target, [str(n) for n in digits.target_names], "scikit-learn's digit")


CELL = 24  # pixels of a side
REGIONS = (3, 4)  # rows and columns of regions in a photograph


class Photographs(PixelImages):
    def __init__(self, held_out: bool = False) -> None:
        from sklearn.datasets import load_sample_images

        pieces, labels = [], []
        for number, pixels in enumerate(load_sample_images().images):
            rows, columns = pixels.shape[0] // CELL, pixels.shape[1] // CELL
            for row, column in np.ndindex(rows, columns):
                if (row + column) % 2 == held_out:
                    top, left = row * CELL, column * CELL
                    pieces.append(pixels[top : top + CELL, left : left + CELL])
                    region = row * REGIONS[0] // rows, column * REGIONS[1] // columns
                    labels.append((number * REGIONS[0] + region[0]) * REGIONS[1] + region[1])
        classes = [f"{name} {r},{c}" for name in ("temple", "flower") for r, c in np.ndindex(*REGIONS)]
        super().__init__(pieces, np.array(labels), classes, "scikit-learn's photographs, piece")
