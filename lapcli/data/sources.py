"""Data sources by name: those that come with lap, and those that other packages add.

    class Fables(DocumentSource):
        name = "fables"                     # in a recipe: `data: {train: "plugin:fables"}`
        def fingerprint(self): return "1"   # changes when the text does
        def rows(self): yield from ...      # documents

    def register(extensions):               # in the module of the entry point group `lap.plugins`
        extensions.add("data source", Fables())

Text and conversations are written once to a jsonl file in the cache, which a run reads like any other local file.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.data.cache import build_once, digest
from lapcli.recipe.data_sources import PREFIX, Modality, find_source
from lapcli.runtime.environment import cache_dir

if TYPE_CHECKING:
    from lapcli.data.images.image_set import ImageSet

ROWS_FILE = "text.jsonl"


class DataSource(ABC):
    name: ClassVar[str]  # used as `plugin:NAME` in a recipe
    modality: ClassVar[Modality]


class LabelledImageSource(DataSource):
    """Images for `data.train`. Their identity is computed from labels, sizes and content, as for every image set."""

    modality = "images"
    train_images: ClassVar[int | None] = None  # if known without opening them; `lap plan` counts steps with it

    @abstractmethod
    def images(self) -> "tuple[ImageSet, ImageSet | None]":
        """Return the training images, and those that the source itself holds out, if any."""


class RowSource(DataSource):
    """Rows that are generated once and cached."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes whenever `rows` does. It is called at every start, so it should be cheap."""

    @abstractmethod
    def rows(self) -> Iterator[Any]:
        """Yield every row, always in the same order."""

    def file(self) -> Path:
        """Return a jsonl file of all rows, written on the first call."""
        return build_once(self.folder(), self._write) / ROWS_FILE

    def folder(self) -> Path:
        """Return the folder where that file is, or will be."""
        return cache_dir() / "sources" / digest(self.name, self.fingerprint())[:32]

    def _write(self, folder: Path) -> None:
        rows = ({"text": row} if self.modality == "text" else row for row in self.rows())
        with (folder / ROWS_FILE).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


class DocumentSource(RowSource):
    """Text for `data.train`: a row is one document."""

    modality = "text"


class ConversationSource(RowSource):
    """Conversations for `source:` in a mixture: a row is a list of {role, content}, or whatever its `format` reads."""

    modality = "chat"


#: Training images of public sets, with which `lap plan` counts the steps of a recipe before anything is downloaded.
TRAIN_IMAGES = {
    "builtin": 1_797,  # scikit-learn's digits
    "hub:uoft-cs/cifar10": 50_000,
    "hub:uoft-cs/cifar100": 50_000,
    "hub:ILSVRC/imagenet-1k": 1_281_167,
}


def known_images(source: str) -> int | None:
    """Return the number of training images of a source; None if it is not known before it is opened."""
    if source.startswith(PREFIX):
        return getattr(find_source(source, "images"), "train_images", None)
    return TRAIN_IMAGES.get(source)
