"""Data sources by name: those that come with lap, and those that other packages add.

    class Fables(DocumentSource):
        name = "fables"                     # in a recipe: `data: {train: "plugin:fables"}`
        def fingerprint(self): return "1"   # another one when the text changes
        def rows(self): yield from ...      # documents

    def register(extensions):               # of the package's module in the entry point group `lap.plugins`
        extensions.add("data source", Fables())

Text and conversations are written to a file in the cache once, from which a run reads them like any other jsonl file,
so that everything (validation split, tokens, checksums, identity in `run.json`) holds for them as for local files.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.data.cache import build_once, digest
from lapcli.recipe.data_sources import Modality
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import open_to_write, sha256_of_file, write_text

if TYPE_CHECKING:
    from lapcli.data.images.image_set import ImageSet

ROWS_FILE = "text.jsonl"


class DataSource(ABC):
    name: ClassVar[str]  # a recipe says `plugin:NAME`
    modality: ClassVar[Modality]


class LabelledImageSource(DataSource):
    """Images for `data.train`. Their identity is computed from labels, sizes and content, as for every image set."""

    modality = "images"
    train_images: ClassVar[int | None] = None  # if it is known without opening them, `lap plan` counts steps with it

    @abstractmethod
    def images(self) -> "tuple[ImageSet, ImageSet | None]":
        """The training images, and those the source itself holds out, if any."""


class RowSource(DataSource):
    """Rows that are made once and kept in the cache."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Another one whenever `rows` would give something else. It is asked at every start, so it should be cheap."""

    @abstractmethod
    def rows(self) -> Iterator[Any]:
        """Every row, always in the same order."""

    def file(self) -> Path:
        """A jsonl file of all rows, written on the first call."""
        return build_once(self.folder(), self._write, _is_whole) / ROWS_FILE

    def folder(self) -> Path:
        """Where that file is, or will be."""
        return cache_dir() / "sources" / digest(self.name, self.fingerprint())[:32]

    def _write(self, folder: Path) -> None:
        content, count = hashlib.sha256(), 0
        with open_to_write(folder / ROWS_FILE) as file:
            for count, row in enumerate(self.rows(), start=1):
                try:
                    line = json.dumps(self._json(row)).encode() + b"\n"
                except (TypeError, ValueError) as error:
                    raise DataError(f"row {count} of the data source {self.name} is not usable: {error}") from None
                file.write(line)
                content.update(line)
        if count == 0:
            raise DataError(f"the data source {self.name} has no rows; name another in the recipe")
        write_text(folder / "index.json", json.dumps({"sha256": content.hexdigest()}))

    def _json(self, row: Any) -> Any:
        return row


class DocumentSource(RowSource):
    """Text for `data.train`: a row is one document."""

    modality = "text"

    def _json(self, row: Any) -> Any:
        if not isinstance(row, str):
            raise TypeError(f"expected text, got {type(row).__name__}")
        return {"text": row}


class ConversationSource(RowSource):
    """Conversations for `source:` in a mixture: a row is a list of {role, content}, or whatever its `format` reads."""

    modality = "chat"


def rows_sha256(file: Path) -> str:
    """The sha256 of a source's file, as it was written with it."""
    return str(json.loads((file.parent / "index.json").read_text())["sha256"])


def _is_whole(folder: Path) -> bool:
    try:
        return sha256_of_file(folder / ROWS_FILE) == rows_sha256(folder / ROWS_FILE)
    except (OSError, ValueError, KeyError, TypeError):
        return False
