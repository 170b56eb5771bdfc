"""Images in a folder for each class: `train/n01443537/n01443537_0.JPEG`. Classes are numbered by name."""

import os
from pathlib import Path

import numpy as np

from lapcli.data.images.image_set import ImageSet
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import open_to_read

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class FolderImages(ImageSet):
    """Images of a folder with a folder per class. Links are followed, but no image may be in two classes, and no folder
    may be visited twice."""

    def __init__(self, folder: Path, turned: bool = False) -> None:
        classes = sorted(entry.name for entry in os.scandir(folder) if _is_folder(entry) and entry.name[:1] != ".")
        if not classes:
            raise DataError(f"{folder} has no folders of images; expected one for each class")
        walk = _Walk()
        labels: list[int] = []
        for label, name in enumerate(classes):
            before = len(walk.files)
            walk.add(str(folder / name))
            if len(walk.files) == before:
                raise DataError(f"{folder / name} has no images ({', '.join(SUFFIXES)}); add some or remove the folder")
            labels += [label] * (len(walk.files) - before)
        self._files, self._identities = walk.files, np.array(walk.identities, dtype=np.uint64)
        super().__init__(np.array(labels), classes, turned)
        self._refuse_two_classes()

    def _refuse_two_classes(self) -> None:
        """Refuse a file that is, by a link, in the folders of two classes: it would be trained on as both."""
        order = np.lexsort((self.labels, *self._identities.T))
        identities, labels = self._identities[order], self.labels[order]
        same = (identities[1:] == identities[:-1]).all(axis=1) & (labels[1:] != labels[:-1])
        if same.any():
            place = int(np.flatnonzero(same)[0])
            first, second = (self._files[order[place + offset]] for offset in (0, 1))
            raise DataError(
                f"{first} and {second} are the same file, by a link, in the folders of two classes; remove one of them"
            )

    def encoded(self, index: int) -> bytes:
        try:
            with open_to_read(self._files[index]) as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{self._files[index]} cannot be read ({error.strerror}); was it moved?") from None

    def sizes(self) -> np.ndarray:
        return np.array([os.stat(path).st_size for path in self._files])

    def name(self, index: int) -> str:
        return self._files[index]

    def files(self) -> np.ndarray:
        return self._identities


def is_image_folder(folder: Path) -> bool:
    """Whether a folder has a folder of images for each class, and not the splits of a data set."""
    for entry in os.scandir(folder):
        if _is_folder(entry):
            walk = _Walk()
            walk.add(entry.path, only_first=True)
            if walk.files:
                return True
    return False


class _Walk:
    """Collects the images below folders, sorted by name; some data sets have one more level of folders."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.identities: list[tuple[int, int]] = []  # device and inode of each
        self._folders: dict[tuple[int, int], str] = {}

    def add(self, folder: str, only_first: bool = False) -> None:
        try:
            status = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{folder} cannot be read ({error.strerror}); check its permissions") from None
        other = self._folders.setdefault((status.st_dev, status.st_ino), folder)
        if other != folder:
            raise DataError(
                f"{other} and {folder} are the same folder, by a link: its images would count several times, or in two "
                "classes; remove the link"
            )
        below = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                below.append(entry.path)
            elif entry.name.lower().endswith(SUFFIXES):
                if not entry.is_file() and os.path.exists(entry.path):  # reading a pipe would wait for its writer
                    raise DataError(f"{entry.path} is a pipe or a device and not an image; remove it")
                self.files.append(entry.path)
                self.identities.append(_identity(entry, status.st_dev))
                if only_first:
                    return
        for path in below:
            self.add(path, only_first)
            if only_first and self.files:
                return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(entry: os.DirEntry[str], device: int) -> tuple[int, int]:
    """Return device and inode; except for links, the directory listing has them without a `stat`."""
    if not entry.is_symlink():
        return device, entry.inode()
    try:
        status = entry.stat()
    except OSError:  # a broken link is reported when it is read
        return device, entry.inode()
    return status.st_dev, status.st_ino
