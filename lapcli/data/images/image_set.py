"""A set of labelled images: decoded on demand, or once and then kept in memory; and a subset of another set."""

import hashlib
import io
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image, ImageOps

from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

# A photograph of a hundred megapixels is large, not an attack; Pillow refuses at twice that.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


#: Images whose content is hashed for a set's identity, spread over the set; all labels and encoded sizes are hashed.
HASHED_IMAGES = 1000
#: Images from whose sizes the memory of the whole set is estimated.
SAMPLED_IMAGES = 64
#: Metadata of a JPEG that may have its orientation. Without any of them exif_transpose and its copy are skipped.
_PLACES_OF_ORIENTATION = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}


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

    def sizes(self) -> np.ndarray:
        """Return the bytes of each encoded image, without reading them."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the file or row, for messages."""
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        """Decode an image as RGB, whatever its mode in the file."""
        return decode(self.encoded(index), self.name(index), self._turned)

    def files(self) -> np.ndarray | None:
        """Return device and inode of each image's file; None if images are not files."""
        return None

    def identity(self) -> str:
        """Return a hash of images, labels, classes and their order, the same on every machine."""
        content = hashlib.sha256(repr((self.classes, len(self))).encode())
        content.update(self.labels.tobytes())
        content.update(self.sizes().astype(np.int64).tobytes())
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

    def sizes(self) -> np.ndarray:
        return self._whole.sizes()[self._indices]

    def name(self, index: int) -> str:
        return self._whole.name(int(self._indices[index]))

    def image(self, index: int) -> Image.Image:
        return self._whole.image(int(self._indices[index]))

    def files(self) -> np.ndarray | None:
        files = self._whole.files()
        return None if files is None else files[self._indices]


class HeldImages(ImageSet):
    """Images decoded once into one torch tensor, whose memory worker processes share however they are started."""

    def __init__(self, source: ImageSet, progress: Progress | None = None) -> None:
        super().__init__(source.labels, source.classes)
        self._source, self._identity = source, source.identity()
        shapes, pieces = [], []
        for index in range(len(source)):
            pixels = np.asarray(source.image(index))
            shapes.append(pixels.shape[:2])
            pieces.append(pixels.reshape(-1))
            if progress and index % 1000 == 0:
                progress("decoding images", index, len(source))
        self._shapes: np.ndarray = np.array(shapes)
        self._ends = np.cumsum(3 * self._shapes.prod(axis=1))
        self._pixels = torch.from_numpy(np.concatenate(pieces)).share_memory_()

    def encoded(self, index: int) -> bytes:
        return self._source.encoded(index)

    def sizes(self) -> np.ndarray:
        return self._source.sizes()

    def name(self, index: int) -> str:
        return self._source.name(index)

    def identity(self) -> str:
        return self._identity

    def files(self) -> np.ndarray | None:
        return self._source.files()

    def image(self, index: int) -> Image.Image:
        height, width = self._shapes[index]
        end = int(self._ends[index])
        return Image.fromarray(self._pixels[end - 3 * height * width : end].numpy().reshape(height, width, 3))


def decode(encoded: bytes, name: str, turned: bool = False) -> Image.Image:
    """Decode as RGB, with the pixels as stored, or `turned` by the EXIF orientation."""
    try:
        image: Image.Image
        with Image.open(io.BytesIO(encoded)) as image:
            if turned and (image.format != "JPEG" or not _PLACES_OF_ORIENTATION.isdisjoint(image.info)):
                image = ImageOps.exif_transpose(image)
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
    return Image.fromarray(np.rint(grey / 257).astype(np.uint8))


def sampled_sizes(images: ImageSet) -> np.ndarray:
    """Return width and height, N x 2, of a few images, spread over the set."""
    sample = np.linspace(0, len(images) - 1, min(len(images), SAMPLED_IMAGES)).astype(int)
    return np.array([images.image(int(index)).size for index in sample])


def hold(
    images: ImageSet, gigabytes: float, progress: Progress | None = None, sizes: np.ndarray | None = None
) -> ImageSet:
    """Decode the set into memory if it fits, estimated by the sizes of a sample; else return it unchanged."""
    sizes = sampled_sizes(images) if sizes is None else sizes
    if 3 * sizes.prod(axis=1).mean() * len(images) > gigabytes * 1e9:
        return images
    return HeldImages(images, progress)


def check_labels(labels: Sequence[int | None] | np.ndarray, classes: int, name: Callable[[int], str]) -> np.ndarray:
    """Return labels as an array; DataError names a row whose label is not a whole number from 0 to classes - 1."""
    for index, label in enumerate(labels):
        if isinstance(label, bool) or not isinstance(label, int | np.integer):
            raise DataError(f"{name(index)} has the label {repr(label)[:60]}; expected the number of a class, from 0")
        if not 0 <= label < classes:
            raise DataError(f"{name(index)} has the label {label}; expected a class from 0 to {classes - 1}")
    return np.array(labels, dtype=np.int64)
