"""ADE20K's scenes with their label maps: 150 classes, label 0 for what is not labelled.

From a folder in the official layout of ADEChallengeData2016 (`images/training/*.jpg`, `annotations/training/*.png`, and
the same under `validation`), from a hub data set, or from a folder of parquet files with the hub's columns.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from lapcli.data.cache import digest
from lapcli.data.images.folder import SUFFIXES
from lapcli.data.images.image_set import HASHED_IMAGES, decode
from lapcli.data.images.tables import has_tables, load_tables
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

CLASSES = 150
IGNORED = 255  # what label 0 becomes; class c of the file is c - 1
PARTS = ("training", "validation")
LAYOUT = "images/training, annotations/training, images/validation and annotations/validation"
#: The hub's copy is a script, which nothing runs any more; the hub itself has converted it to parquet files.
_CONVERTED = ("zhoubolei/scene_parse_150", "refs/convert/parquet", "scene_parsing")


class Scenes:
    """Encoded photographs and label maps; readers of files and tables say where the bytes come from."""

    def __len__(self) -> int:
        raise NotImplementedError

    def encoded(self, index: int) -> tuple[bytes, bytes]:
        """The photograph and its label map."""
        raise NotImplementedError

    def names(self, index: int) -> tuple[str, str]:
        """The files or rows of both, for messages."""
        raise NotImplementedError

    def scene(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """The photograph as RGB and its classes, uint8: 0 to 149, and 255 where nothing is labelled."""
        photograph, labels = self.encoded(index)
        name, label_name = self.names(index)
        image = decode(photograph, name)
        return image, decode_labels(labels, label_name, image.size)

    def identity(self) -> str:
        """The same for the same scenes in the same order, on every machine."""
        content = hashlib.sha256(str(len(self)).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, min(len(self), HASHED_IMAGES)).astype(int)):
            for part in self.encoded(int(index)):
                content.update(hashlib.sha256(part).digest())
        return content.hexdigest()


@dataclass(frozen=True)
class SceneData:
    train: Scenes
    validation: Scenes
    description: str
    identity: str


class FolderScenes(Scenes):
    def __init__(self, root: Path, part: str) -> None:
        photographs, labels = root / "images" / part, root / "annotations" / part
        for folder in (photographs, labels):
            if not folder.is_dir():
                raise DataError(f"there is no folder {folder}; ADE20K's layout is {LAYOUT}")
        names = sorted(n for n in os.listdir(photographs) if n.lower().endswith(SUFFIXES) and n[:1] != ".")
        if not names:
            raise DataError(f"{photographs} has no images; ADE20K's layout is {LAYOUT}")
        self._files = [(photographs / name, labels / f"{Path(name).stem}.png") for name in names]
        missing = [labels_file for _, labels_file in self._files if not labels_file.is_file()]
        if missing:
            raise DataError(f"{missing[0]} is missing ({len(missing):,} of {len(names):,} photographs have no labels)")

    def __len__(self) -> int:
        return len(self._files)

    def encoded(self, index: int) -> tuple[bytes, bytes]:
        photograph, labels = self._files[index]
        try:
            return photograph.read_bytes(), labels.read_bytes()
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read ({error.strerror}); was it moved?") from None

    def names(self, index: int) -> tuple[str, str]:
        photograph, labels = self._files[index]
        return str(photograph), str(labels)


class TableScenes(Scenes):
    def __init__(self, table: Any, source: str, split: str, columns: Sequence[str]) -> None:
        from datasets import Image as ImageFeature

        missing = [column for column in columns if column not in table.column_names]
        if missing:
            have = ", ".join(table.column_names)
            raise DataError(
                f"{source} has no column {missing[0]}; it has {have} (--set ade20k.image_column, ade20k.label_column)"
            )
        self._place, self._columns = f"{source}, split {split}", list(columns)
        self._table = table.select_columns(self._columns)
        for column in columns:
            self._table = self._table.cast_column(column, ImageFeature(decode=False))
        if not len(self._table):
            raise DataError(f"{self._place} has no rows")

    def __len__(self) -> int:
        return len(self._table)

    def encoded(self, index: int) -> tuple[bytes, bytes]:
        row = self._table[index]
        found = [row[column] and row[column]["bytes"] for column in self._columns]
        for content, name in zip(found, self.names(index), strict=True):
            if not content:
                raise DataError(f"{name} is empty")
        return found[0], found[1]

    def names(self, index: int) -> tuple[str, str]:
        first, second = (f"{self._place}, row {index}, column {column}" for column in self._columns)
        return first, second


class SomeScenes(Scenes):
    """Some scenes of another set."""

    def __init__(self, whole: Scenes, positions: Sequence[int]) -> None:
        self._whole, self._positions = whole, positions

    def __len__(self) -> int:
        return len(self._positions)

    def encoded(self, index: int) -> tuple[bytes, bytes]:
        return self._whole.encoded(self._positions[index])

    def names(self, index: int) -> tuple[str, str]:
        return self._whole.names(self._positions[index])


def decode_labels(encoded: bytes, name: str, size: tuple[int, int]) -> np.ndarray:
    """A label map of a photograph of `size` (width, height); anything else is an error that names the file."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            mode, found, values = image.mode, image.size, np.asarray(image)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = str(error).split(" <")[0] or type(error).__name__
        raise DataError(f"{name} cannot be decoded as a label map ({reason}); mend or remove it") from None
    if mode not in {"L", "P", "I", "I;16"}:
        raise DataError(f"{name} is no label map: its mode is {mode}, expected one channel with a class for each pixel")
    if found != size:
        raise DataError(
            f"{name} is no label map of its photograph: it has {found[0]} x {found[1]} pixels, "
            f"the photograph {size[0]} x {size[1]}"
        )
    for label in (int(values.min()), int(values.max())):
        if not 0 <= label <= CLASSES:
            raise DataError(
                f"{name} is no label map of ADE20K: it has the label {label}, expected 0 to {CLASSES} (0: not labelled)"
            )
    return (values.astype(np.int16) - 1).astype(np.uint8)  # 0 becomes 255


def is_ade20k(folder: Path) -> bool:
    """Whether a folder has the official layout, rather than images for each class."""
    return any((root / "annotations").is_dir() for root in _roots(folder))


def open_ade20k(
    source: str, revision: str | None = None, image_column: str = "image", label_column: str = "annotation"
) -> SceneData:
    """Both parts; `source` is hub:OWNER/NAME or a folder."""
    train, validation = _parts(source, revision, (image_column, label_column))
    description = f"{source}: {len(train):,} training and {len(validation):,} validation scenes of {CLASSES} classes"
    return SceneData(train, validation, description, digest(train.identity(), validation.identity()))


def check_scenes(data: SceneData, progress: Progress | None = None) -> None:
    """Decodes every scene once: a bad label map is named before hours of training, not after."""
    total, done = len(data.train) + len(data.validation), 0
    for scenes in (data.train, data.validation):
        for index in range(len(scenes)):
            scenes.scene(index)
            done += 1
            if progress and done % 100 == 0:
                progress("checking label maps", done, total)


def _parts(source: str, revision: str | None, columns: Sequence[str]) -> tuple[Scenes, Scenes]:
    if source.startswith("hub:"):
        return _tables(source, revision, columns)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; ADE20K comes from hub:OWNER/NAME or from a folder with {LAYOUT}")
    for root in _roots(folder):
        if (root / "annotations").is_dir():
            return FolderScenes(root, PARTS[0]), FolderScenes(root, PARTS[1])
    if has_tables(folder):
        return _tables(source, None, columns)
    raise DataError(f"{folder} is not ADE20K: expected {LAYOUT}, or parquet files")


def _roots(folder: Path) -> tuple[Path, Path]:
    return folder, folder / "ADEChallengeData2016"  # the archive's own folder


def _tables(source: str, revision: str | None, columns: Sequence[str]) -> tuple[Scenes, Scenes]:
    options: dict[str, Any] = {}
    repository, converted, folder = _CONVERTED
    if source == f"hub:{repository}" and revision is None:
        revision = converted
        options["data_files"] = {split: f"{folder}/{split}/*.parquet" for split in ("train", "validation")}
    try:
        splits = load_tables(source, revision, **options)
    except DataError as error:
        if not source.startswith("hub:"):
            raise
        why = "HF_HUB_OFFLINE is set and it is not on this machine" if hub_is_offline() else str(error).split(";")[0]
        raise DataError(
            f"ADE20K could not be loaded from {source}: {why[:300]}; run this where the hub can be reached, or give a "
            f"folder in the official layout ({LAYOUT}) with --set ade20k.data=DIR"
        ) from None
    for split in ("train", "validation"):
        if split not in splits:
            raise DataError(f"{source} has no split `{split}`; it has {', '.join(splits)}")
    return (
        TableScenes(splits["train"], source, "train", columns),
        TableScenes(splits["validation"], source, "validation", columns),
    )
