"""A set of labelled images, decoded on demand, and a subset of another set.

Images may be files in a folder for each class: `train/n01443537/n01443537_0.JPEG`. Classes are numbered by name.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lapcli.runtime.errors import DataError

# A photograph of a hundred megapixels is large, not an attack; Pillow refuses at twice that.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)

#: Images whose content is hashed for a set's identity, spread over the set; the labels of all images are hashed.
HASHED_IMAGES = 1000
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class ImageSet:
    """Labels and encoded images; subclasses read the bytes from files or tables."""

    def __init__(self, labels: np.ndarray, classes: Sequence[str]) -> None:
        self.labels = labels.astype(np.int64)
        self.classes = list(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, index: int) -> bytes:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the file or row, for messages."""
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        """Decode an image as RGB, whatever its mode in the file."""
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
