"""Images in a folder for each class: `train/n01443537/n01443537_0.JPEG`. Classes are numbered by name."""

import os
from pathlib import Path

import numpy as np

from lapcli.data.images.image_set import ImageSet
from lapcli.runtime.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class FolderImages(ImageSet):
    def __init__(self, folder: Path) -> None:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[:1] != ".")
        if not classes:
            raise DataError(f"{folder} has no folders of images; expected one for each class")
        self._folder, self._files, labels = folder, [], []
        for label, name in enumerate(classes):
            found = _images_below(folder / name)
            if not found:
                raise DataError(f"{folder / name} has no images ({', '.join(SUFFIXES)}); remove it or fill it")
            self._files += found
            labels += [label] * len(found)
        super().__init__(np.array(labels), classes)

    def encoded(self, index: int) -> bytes:
        try:
            with open(self._files[index], "rb") as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{self._files[index]} cannot be read ({error.strerror}); was it moved?") from None

    def sizes(self) -> np.ndarray:
        return np.array([os.stat(path).st_size for path in self._files])

    def name(self, index: int) -> str:
        return self._files[index]


def is_image_folder(folder: Path) -> bool:
    """Whether a folder holds a folder of images for each class, rather than the parts of a data set."""
    return any(entry.is_dir() and _images_below(Path(entry.path), only_first=True) for entry in os.scandir(folder))


def _images_below(folder: Path, only_first: bool = False) -> list[str]:
    """Paths of a class's images in the order of their names; some data sets have one more folder in between."""
    found: list[str] = []
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name[:1] != ".")
        found += [
            os.path.join(where, name) for name in sorted(files) if name.lower().endswith(SUFFIXES) and name[:1] != "."
        ]
        if found and only_first:
            break
    return found
