"""ADE20K's scenes with their label maps, and training crops of them: 150 classes, label 0 for unlabelled pixels.

From a folder in the official layout of ADEChallengeData2016 (`images/training/*.jpg`, `annotations/training/*.png`, and
the same under `validation`), from a hub data set, or from a folder of parquet files with the hub's columns. Crops are
scaled and flipped, and their colours distorted; all random draws for a crop are keyed by (seed, epoch, scene).
"""

import hashlib
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import functional

from lapcli.data.files import digest
from lapcli.data.images.image_set import HASHED_IMAGES, SUFFIXES, decode, has_tables, load_tables
from lapcli.data.images.loader import Example, Reader, seed_everything
from lapcli.runtime.errors import DataError

HUB = "hub:zhoubolei/scene_parse_150"
CLASSES = 150
IGNORED = 255  # in place of label 0; label c of the file becomes class c - 1
PARTS = ("training", "validation")
COLUMNS = ("image", "annotation")  # of the hub's table
LAYOUT = "images/training, annotations/training, images/validation and annotations/validation"


class Scenes:
    """Photographs and label maps; `encoded` returns the bytes of both, and `names` their names in messages."""

    def __init__(
        self, count: int, encoded: Callable[[int], tuple[bytes, bytes]], names: Callable[[int], tuple[str, str]]
    ) -> None:
        self._count, self.encoded, self.names = count, encoded, names

    def __len__(self) -> int:
        return self._count

    def scene(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Return the photograph as RGB and its classes, uint8: 0 to 149, and 255 for unlabelled pixels."""
        photograph, labels = self.encoded(index)
        name, label_name = self.names(index)
        image = decode(photograph, name)
        return image, decode_labels(labels, label_name, image.size)

    def identity(self) -> str:
        """Return a hash of a sample of the scenes and their number, the same on every machine."""
        content = hashlib.sha256(str(len(self)).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, min(len(self), HASHED_IMAGES)).astype(int)):
            for part in self.encoded(int(index)):
                content.update(hashlib.sha256(part).digest())
        return content.hexdigest()

    def some(self, positions: Sequence[int] | None) -> "Scenes":
        """Return the scenes at these positions; None: all."""
        if positions is None:
            return self
        return Scenes(len(positions), lambda n: self.encoded(positions[n]), lambda n: self.names(positions[n]))


@dataclass(frozen=True)
class SceneData:
    train: Scenes
    validation: Scenes
    description: str
    identity: str


def _of_folder(root: Path, part: str) -> Scenes:
    photographs, labels = root / "images" / part, root / "annotations" / part
    for folder in (photographs, labels):
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; ADE20K's layout is {LAYOUT}")
    names = sorted(path.name for path in photographs.iterdir() if path.suffix.lower() in SUFFIXES)
    if not names:
        raise DataError(f"{photographs} has no images; ADE20K's layout is {LAYOUT}")
    files = [(photographs / name, labels / f"{Path(name).stem}.png") for name in names]
    missing = [labels_file for _, labels_file in files if not labels_file.is_file()]
    if missing:
        raise DataError(f"{missing[0]} is missing ({len(missing):,} of {len(names):,} photographs have no labels)")
    return Scenes(
        len(files),
        lambda index: (files[index][0].read_bytes(), files[index][1].read_bytes()),
        lambda index: (str(files[index][0]), str(files[index][1])),
    )


def _of_table(table: Any, place: str) -> Scenes:
    from datasets import Image as ImageFeature

    for column in COLUMNS:
        if column not in table.column_names:
            raise DataError(f"{place} has no column {column}; it has {', '.join(table.column_names)}")
        # The bytes as stored: decoding is ours, with its checks of mode and size.
        table = table.cast_column(column, ImageFeature(decode=False))
    if not len(table):
        raise DataError(f"{place} has no rows")

    def names(index: int) -> tuple[str, str]:
        first, second = (f"{place}, row {index}, column {column}" for column in COLUMNS)
        return first, second

    def encoded(index: int) -> tuple[bytes, bytes]:
        row = table[index]
        contents = [row[column] and row[column]["bytes"] for column in COLUMNS]
        for content, name in zip(contents, names(index), strict=True):
            if not content:
                raise DataError(f"{name} is empty")
        return contents[0], contents[1]

    return Scenes(len(table), encoded, names)


def decode_labels(encoded: bytes, name: str, size: tuple[int, int]) -> np.ndarray:
    """Decode the label map of a photograph of `size` (width, height); DataError names the file."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            # In mode P these are palette indices, which are the labels, not colours.
            mode, label_size, values = image.mode, image.size, np.asarray(image)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = str(error).split(" <")[0] or type(error).__name__
        raise DataError(f"{name} cannot be decoded as a label map ({reason}); repair or remove it") from None
    if mode not in {"L", "P", "I", "I;16"}:
        raise DataError(
            f"{name} is not a label map: its mode is {mode}, expected one channel with a class for each pixel"
        )
    if label_size != size:
        raise DataError(
            f"{name} is not the label map of its photograph: it has {label_size[0]} x {label_size[1]} pixels, "
            f"the photograph has {size[0]} x {size[1]}"
        )
    for label in (int(values.min()), int(values.max())):
        if not 0 <= label <= CLASSES:
            raise DataError(
                f"{name} is not a label map of ADE20K: its label {label} is not in 0 to {CLASSES} (0: unlabelled)"
            )
    return (values.astype(np.int16) - 1).astype(np.uint8)  # 0 becomes 255


def open_ade20k(source: str) -> SceneData:
    """Open training and validation parts; `source` is hub:OWNER/NAME or a folder."""
    train, validation = _parts(source)
    description = f"{source}: {len(train):,} training and {len(validation):,} validation scenes of {CLASSES} classes"
    return SceneData(train, validation, description, digest(train.identity(), validation.identity()))


def _parts(source: str) -> tuple[Scenes, Scenes]:
    if source.startswith("hub:"):
        return _tables(source)
    folder = Path(source).expanduser()
    for root in (folder, folder / "ADEChallengeData2016"):  # the archive's own folder
        if (root / "annotations").is_dir():
            return _of_folder(root, PARTS[0]), _of_folder(root, PARTS[1])
    if folder.is_dir() and has_tables(folder):
        return _tables(source)
    raise DataError(f"{folder} is not ADE20K: expected hub:OWNER/NAME, or a folder with {LAYOUT}, or parquet files")


def _tables(source: str) -> tuple[Scenes, Scenes]:
    revision, options = None, {}
    if source == HUB:
        # The hub's copy is a loading script, which `datasets` no longer runs; the hub has converted it to parquet.
        files = {split: f"scene_parsing/{split}/*.parquet" for split in ("train", "validation")}
        revision, options = "refs/convert/parquet", {"data_files": files}
    try:
        splits = load_tables(source, revision, **options)
    except DataError as error:
        raise DataError(
            f"ADE20K could not be loaded from {source}: {str(error).split(';')[0][:300]}; run this where the hub can "
            f"be reached, or give a folder in the official layout ({LAYOUT}) with --set ade20k.data=DIR"
        ) from None
    for split in ("train", "validation"):
        if split not in splits:
            raise DataError(f"{source} has no split `{split}`; it has {', '.join(splits)}")
    return _of_table(splits["train"], f"{source}, train"), _of_table(splits["validation"], f"{source}, validation")


# Both, and the augmentation below, follow DINOv3's eval/segmentation/transforms.py.
CROP_TRIES, LARGEST_SHARE = 10, 0.75


class SceneReader(Reader):
    """Reads uint8 crops and their classes, with the same interface as readers of other images."""

    def __init__(self, scenes: Scenes, size: int, scale: Sequence[float], fill: Sequence[float], seed: int) -> None:
        self._scenes, self._crop_size, self._scale = scenes, size, (scale[0], scale[1])
        # The padding has the mean colour, which is 0 after normalising, up to half a grey level.
        self._fill = np.array([round(255 * x) for x in fill], dtype=np.uint8)
        self._key = seed

    def read(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        size = self._crop_size
        images_BCHW = torch.empty(len(examples), 3, size, size, dtype=torch.uint8)
        labels_BHW = torch.empty(len(examples), size, size, dtype=torch.uint8)
        for row, example in enumerate(examples):
            image, labels = self._scenes.scene(example.index)
            seed_everything(self._key, example.epoch, example.index, example.repeat)
            pixels, classes = self._augmented(image, labels)
            images_BCHW[row] = torch.from_numpy(pixels).permute(2, 0, 1)
            labels_BHW[row] = torch.from_numpy(classes)
        return images_BCHW, labels_BHW

    def _augmented(self, image: Image.Image, labels_HW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self._crop_size
        image = resize_short_side(image, max(1, round(size * random.uniform(*self._scale))))
        # Nearest, because the mean of two classes would be a third class.
        resized = Image.fromarray(labels_HW).resize(image.size, Image.Resampling.NEAREST)
        pixels_HWC, labels_HW = np.asarray(image), np.asarray(resized)
        window = choose_crop(labels_HW, size)
        pixels_HWC, labels_HW = pixels_HWC[window], labels_HW[window]
        if random.random() < 0.5:
            pixels_HWC, labels_HW = pixels_HWC[:, ::-1], labels_HW[:, ::-1]
        # Copied, because the flip has negative strides, which torch lacks.
        pixels_HWC = distort_colours(pixels_HWC.copy())
        # Padded after the colours, so that the padding stays the mean colour.
        padded_HWC = np.broadcast_to(self._fill, (size, size, 3)).copy()
        padded_HW = np.full((size, size), IGNORED, dtype=np.uint8)
        height, width = labels_HW.shape
        padded_HWC[:height, :width], padded_HW[:height, :width] = pixels_HWC, labels_HW
        return padded_HWC, padded_HW


def resize_short_side(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side to `size`, bilinear, keeping the aspect ratio."""
    scale = size / min(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def choose_crop(labels_HW: np.ndarray, size: int) -> tuple[slice, slice]:
    """Choose a random window; try up to ten times to find one where no class exceeds 75% of the labelled pixels."""
    height, width = labels_HW.shape
    for _ in range(CROP_TRIES):
        top, left = random.randint(0, max(0, height - size)), random.randint(0, max(0, width - size))
        window = slice(top, top + size), slice(left, left + size)
        # Without unlabelled pixels, which are not a class.
        counts = np.bincount(labels_HW[window].reshape(-1), minlength=IGNORED + 1)[:IGNORED]
        if np.count_nonzero(counts) > 1 and counts.max() <= LARGEST_SHARE * counts.sum():
            break
    return window


def distort_colours(pixels_HWC: np.ndarray) -> np.ndarray:
    """Distort brightness by +-32 levels, contrast and saturation by 0.5 to 1.5, and hue, each with probability 1/2.

    Contrast is applied before or after saturation and hue, with probability 1/2 each.
    """
    image = torch.from_numpy(pixels_HWC).permute(2, 0, 1).float() / 255
    contrast_first = random.random() < 0.5
    if random.random() < 0.5:
        image = (image + random.uniform(-32, 32) / 255).clamp_(0, 1)
    contrast = random.uniform(0.5, 1.5) if random.random() < 0.5 else 1.0
    if contrast_first:
        image = (image * contrast).clamp_(0, 1)
    if random.random() < 0.5:
        image = functional.adjust_saturation(image, random.uniform(0.5, 1.5))
    if random.random() < 0.5:
        # The full hue circle, as in DINOv3; mmseg's distortion is far weaker.
        image = functional.adjust_hue(image, random.uniform(-0.5, 0.5))
    if not contrast_first:
        image = (image * contrast).clamp_(0, 1)
    return (image * 255).round_().to(torch.uint8).permute(1, 2, 0).numpy()
