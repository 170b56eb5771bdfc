"""A set of labelled images: decoded on demand, or once and then kept in memory; and a subset of another set.

Images may be files in a folder for each class: `train/n01443537/n01443537_0.JPEG`. Classes are numbered by name.
"""

import atexit
import hashlib
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lapcli.data.cache import build_once, digest
from lapcli.runtime.environment import launcher
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

# A photograph of a hundred megapixels is large, not an attack; Pillow refuses at twice that.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)

#: Images whose content is hashed for a set's identity, spread over the set; the labels of all images are hashed.
HASHED_IMAGES = 1000
#: Images from whose sizes the memory of the whole set is estimated.
SAMPLED_IMAGES = 64
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class ImageSet:
    """Labels and encoded images; subclasses read the bytes from files or tables.

    `turned`: apply the EXIF orientation instead of using the pixels as stored.
    """

    def __init__(self, labels: np.ndarray, classes: Sequence[str], turned: bool = False) -> None:
        self.labels = labels.astype(np.int64)
        self.classes = list(classes)
        self._turned = turned

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, index: int) -> bytes:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the file or row, for messages."""
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        """Decode an image as RGB, whatever its mode in the file."""
        return decode(self.encoded(index), self.name(index), self._turned)

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
        super().__init__(whole.labels[indices], whole.classes, whole._turned)
        self._whole, self._indices = whole, indices

    def encoded(self, index: int) -> bytes:
        return self._whole.encoded(int(self._indices[index]))

    def name(self, index: int) -> str:
        return self._whole.name(int(self._indices[index]))

    def image(self, index: int) -> Image.Image:
        return self._whole.image(int(self._indices[index]))


class ImagesInMemory(ImageSet):
    """Images decoded once into a temporary file that all processes of a launch on this machine map: one copy in all."""

    def __init__(self, source: ImageSet, progress: Progress | None = None) -> None:
        super().__init__(source.labels, source.classes)
        # Before decoding, of the encoded images: a set has the same identity in memory and on disk.
        self._source, self._identity = source, source.identity()
        key = digest(self._identity, source._turned)
        self._folder = build_once(_launch_folder() / key, lambda folder: self._decode(folder, progress))
        self._places_N3 = np.load(self._folder / "places.npy")  # first byte, height and width of each image
        self._pixels: np.ndarray | None = None  # mapped by each process when it needs it

    def _decode(self, folder: Path, progress: Progress | None) -> None:
        places, first = [], 0
        with (folder / "pixels").open("wb") as file:
            for index in range(len(self)):
                pixels = np.asarray(self._source.image(index))
                places.append((first, *pixels.shape[:2]))
                first += file.write(pixels.tobytes())
                if progress and index % 1000 == 0:
                    progress("decoding images", index, len(self))
        np.save(folder / "places.npy", np.array(places))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None}  # a worker maps the file; a pickled map would be a copy

    def encoded(self, index: int) -> bytes:
        return self._source.encoded(index)

    def name(self, index: int) -> str:
        return self._source.name(index)

    def identity(self) -> str:
        return self._identity

    def image(self, index: int) -> Image.Image:
        if self._pixels is None:
            self._pixels = np.memmap(self._folder / "pixels", mode="r")
        first, height, width = self._places_N3[index]
        return Image.fromarray(self._pixels[first : first + 3 * height * width].reshape(height, width, 3))


def _launch_folder() -> Path:
    """Return a temporary folder that the processes of this launch share, and remove those of launches that ended."""
    root = Path(tempfile.gettempdir()) / f"lap-images-{os.getuid()}"
    for folder in root.glob("*"):
        try:
            os.kill(int(folder.name), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            pass  # somebody else's
    own = root / str(launcher() or os.getpid())
    atexit.register(shutil.rmtree, own, ignore_errors=True)  # a file that another process has mapped stays readable
    return own


def decode(encoded: bytes, name: str, turned: bool = False) -> Image.Image:
    """Decode as RGB, with the pixels as stored, or `turned` by the EXIF orientation."""
    try:
        image: Image.Image
        with Image.open(io.BytesIO(encoded)) as image:
            image = ImageOps.exif_transpose(image) if turned else image
            image.load()
            return image if image.mode == "RGB" else _eight_bits(image).convert("RGB")
    except Exception as error:  # Pillow's readers raise many kinds of errors for damaged files
        reason = str(error).split(" <")[0] or type(error).__name__
        raise DataError(f"{name} cannot be decoded as an image ({reason}); repair or remove it") from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit greys to 8 bits, since Pillow would clip them at 255; ValueError if their range is not known."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    grey = np.asarray(image)
    if image.mode == "F" or grey.min() < 0 or grey.max() >= 2**16:
        raise ValueError(f"greys of mode {image.mode} have no known range; expected 8 or 16 bits")
    return Image.fromarray(np.rint(grey / 257).astype(np.uint8))  # 257: 65,535 becomes 255


def sampled_sizes(images: ImageSet) -> np.ndarray:
    """Return width and height, N x 2, of a few images, spread over the set."""
    sample = np.linspace(0, len(images) - 1, min(len(images), SAMPLED_IMAGES)).astype(int)
    return np.array([images.image(int(index)).size for index in sample])


def decode_into_memory(
    images: ImageSet, gigabytes: float, progress: Progress | None = None, sizes: np.ndarray | None = None
) -> ImageSet:
    """Decode the set into memory if it fits, estimated by the sizes of a sample; else return it unchanged."""
    sizes = sampled_sizes(images) if sizes is None else sizes
    if 3 * sizes.prod(axis=1).mean() * len(images) > gigabytes * 1e9:
        return images
    return ImagesInMemory(images, progress)


class FolderImages(ImageSet):
    """Images of a folder with a folder for each class, which may have one more level of folders.

    A class and an image may be links; hidden files, and links to folders within a class, are left out.
    """

    def __init__(self, folder: Path, turned: bool = False) -> None:
        classes = sorted(entry.name for entry in os.scandir(folder) if os.path.isdir(entry) and entry.name[:1] != ".")
        if not classes:
            raise DataError(f"{folder} has no folders of images; expected one for each class")
        files = [list(image_files(folder / name)) for name in classes]
        if not all(files):
            empty = folder / classes[files.index([])]
            raise DataError(f"{empty} has no images ({', '.join(SUFFIXES)}); add some or remove the folder")
        self._files = [file for of_class in files for file in of_class]
        super().__init__(np.repeat(np.arange(len(classes)), list(map(len, files))), classes, turned)

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
