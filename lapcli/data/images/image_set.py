"""A set of labelled images, decoded on demand: of a folder for each class, of a table, or a subset of another set.

Tables are hub data sets by name, and local folders of parquet files with the hub's columns and splits. Both go through
`datasets.load_dataset`, so that local and hub files behave alike.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapcli.runtime.environment import cache_dir, hub_is_offline
from lapcli.runtime.errors import DataError

# A photograph of a hundred megapixels is large, not an attack; Pillow refuses at twice that.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)

#: Images whose content is hashed for a set's identity, spread over the set; the labels of all images are hashed.
HASHED_IMAGES = 1000
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


#: Names of a source's held-out split, in order of preference: ImageNet's `test` has no labels, its `validation` has.
HELD_OUT = ("validation", "valid", "val", "test")
#: Larger labels are not classes but, for example, image ids.
MOST_CLASSES = 1_000_000


class ImageSet:
    """Labels and encoded images; subclasses read the bytes from files or tables."""

    def __init__(self, labels: np.ndarray, classes: Iterable[str]) -> None:
        self.labels = labels.astype(np.int64)
        self.classes = list(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, index: int) -> bytes:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the file or row name, for messages."""
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        """Decode an image as RGB, from any mode."""
        return decode(self.encoded(index), self.name(index))

    def identity(self) -> str:
        """Return a hash of images, labels, classes and their order, the same on every machine."""
        content = hashlib.sha256(repr((self.classes, len(self))).encode())
        # Without the sizes of all images, which would take a `stat` for every file at every start.
        content.update(self.labels.tobytes())
        for index in np.unique(np.linspace(0, len(self) - 1, min(len(self), HASHED_IMAGES)).astype(int)):
            content.update(self.encoded(int(index)))
        return content.hexdigest()


class ImageSubset(ImageSet):
    """Some images of another set, in the given order."""

    def __init__(self, whole: ImageSet, indices: np.ndarray) -> None:
        super().__init__(whole.labels[indices], whole.classes)
        self._whole, self._indices = whole, indices

    def encoded(self, index: int) -> bytes:
        return self._whole.encoded(int(self._indices[index]))

    def name(self, index: int) -> str:
        return self._whole.name(int(self._indices[index]))

    def image(self, index: int) -> Image.Image:
        return self._whole.image(int(self._indices[index]))


def decode(encoded: bytes, name: str) -> Image.Image:
    """Decode as RGB, with the pixels as stored: an EXIF orientation is not applied."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode == "F" or image.mode.startswith("I"):  # Pillow would clip 16 bits at 255
                raise ValueError(f"its mode {image.mode} has more than 8 bits per channel; convert it")
            return image.convert("RGB")
    except Exception as error:  # Pillow's readers raise many kinds of errors for damaged files
        reason = str(error).split(" <")[0] or type(error).__name__
        raise DataError(f"{name} cannot be decoded as an image ({reason}); repair or remove it") from None


def sampled_sizes(images: ImageSet) -> np.ndarray:
    """Return width and height, N x 2, of a few images, spread over the set."""
    sample = np.linspace(0, len(images) - 1, min(len(images), 64)).astype(int)
    return np.array([images.image(int(index)).size for index in sample])


class FolderImages(ImageSet):
    """Images of a folder with one subfolder per class, which may be nested one level deeper.

    A class and an image may be links; hidden files, and links to folders within a class, are left out.
    """

    def __init__(self, folder: Path) -> None:
        classes = sorted(entry.name for entry in os.scandir(folder) if os.path.isdir(entry) and entry.name[:1] != ".")
        if not classes:
            raise DataError(f"{folder} has no image folders; expected one for each class")
        files = [list(image_files(folder / name)) for name in classes]
        if not all(files):
            empty = folder / classes[files.index([])]
            raise DataError(f"{empty} has no images ({', '.join(SUFFIXES)}); add some or remove the folder")
        self._files = [file for of_class in files for file in of_class]
        super().__init__(np.repeat(np.arange(len(classes)), list(map(len, files))), classes)

    def encoded(self, index: int) -> bytes:
        try:
            return Path(self._files[index]).read_bytes()
        except OSError as error:
            raise DataError(f"{self._files[index]} cannot be read ({error.strerror}); was it moved?") from None

    def name(self, index: int) -> str:
        return self._files[index]


def image_files(folder: Path) -> Iterator[str]:
    """Yield the images below a folder, sorted by name."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); check its permissions")

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[:1] != ".")  # in place: os.walk descends into these
        images = sorted(name for name in names if name.lower().endswith(SUFFIXES) and name[:1] != ".")
        yield from (os.path.join(place, name) for name in images)


class TableImages(ImageSet):
    """Images of a table that `datasets` has loaded: a hub data set, or local parquet files with the hub's columns."""

    def __init__(self, table: Any, place: str, label_column: str | None) -> None:
        from datasets import ClassLabel, Value
        from datasets import Image as ImageFeature

        self._place, features = place, table.features
        # Without the hub's metadata an image is a dictionary of its bytes and its path.
        images = [
            name
            for name, feature in features.items()
            if isinstance(feature, ImageFeature) or (isinstance(feature, dict) and set(feature) == {"bytes", "path"})
        ]
        numbers = [n for n, f in features.items() if isinstance(f, Value) and f.dtype.startswith(("int", "uint"))]
        named = [name for name, feature in features.items() if isinstance(feature, ClassLabel)] or numbers
        labels = named if label_column is None else [label_column]
        if len(images) != 1 or len(labels) != 1 or labels[0] not in features:
            have = ", ".join(table.column_names)
            raise DataError(f"{place} needs one column of images and one of labels; it has {have} (data.label_column)")
        column = np.array(table[labels[0]][:])  # a column of `datasets` 4 is lazy; the slice reads it once
        feature = features[labels[0]]
        names = feature.names if isinstance(feature, ClassLabel) else None
        most = MOST_CLASSES if names is None else len(names)
        if column.dtype.kind not in "iu" or not 0 <= column.min() <= column.max() < most:
            raise DataError(f"{place}: {labels[0]} has labels that are no numbers of classes; set data.label_column")
        super().__init__(column, names or map(str, range(column.max() + 1)))
        self._column = images[0]
        self._table = table.select_columns(images).cast_column(self._column, ImageFeature(decode=False))

    def encoded(self, index: int) -> bytes:
        cell = self._table[index][self._column]
        try:
            return cell["bytes"] or Path(cell["path"]).read_bytes()
        except (OSError, TypeError) as error:
            raise DataError(f"{self.name(index)} has no readable image in column {self._column} ({error})") from None

    def name(self, index: int) -> str:
        return f"{self._place}, row {index}"


def open_tables(
    source: str, revision: str | None = None, label_column: str | None = None
) -> tuple[TableImages, TableImages | None]:
    """Open the training images, and the source's own held-out images; `source` is hub:OWNER/NAME or a folder."""
    splits = load_tables(source, revision)
    if "train" not in splits:
        raise DataError(f"{source} has no split `train`; it has {', '.join(splits)}")
    train = TableImages(splits["train"], f"{source}, split train", label_column)
    split = next((name for name in HELD_OUT if name in splits), None)
    return train, TableImages(splits[split], f"{source}, split {split}", label_column) if split else None


def load_tables(source: str, revision: str | None, **options: Any) -> Any:
    """Load the splits of a hub data set, or of a folder of parquet files, which are converted once in our cache."""
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    if hub_is_offline():  # the libraries read the variable only when they are imported, which may be earlier
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        if source.startswith("hub:"):
            return datasets.load_dataset(source.removeprefix("hub:"), revision=revision, **options)
        return datasets.load_dataset(source, cache_dir=str(cache_dir() / "datasets"), **options)
    except Exception as error:
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"{source} could not be loaded ({reason}); run `lap fetch RECIPE` where the hub can be reached (of a gated "
            "set after `hf auth login`), or give local files with --data DIR"
        ) from error


def has_tables(folder: Path) -> bool:
    return next(folder.rglob("*.parquet"), None) is not None
