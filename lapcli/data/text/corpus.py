"""A corpus: files read as one sequence of documents, those to train on and those held out kept apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lapcli.data.cache import digest
from lapcli.data.fingerprint import content_sha256, fingerprint_of_0_1, remembered_sha256
from lapcli.data.text.formats import read_batches
from lapcli.data.text.split import cut_in_two, held_out
from lapcli.recipe.schema import TextSource
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file
from lapcli.runtime.progress import Progress

DEFAULT_FRACTION = 1 / 20
_READ_AT_ONCE = 1 << 26  # bytes of a corpus that are read without a second thought


@dataclass(frozen=True)
class SourceFile:
    name: str  # within the source, as the recipe and error messages call it
    path: Path
    size: int
    content: tuple[str | int, ...] | None  # a hash known without reading the file; none: it has to be read


class Parts(NamedTuple):
    """Some documents in source order, those to train on and those held out."""

    train: list[str]
    validation: list[str]


class Corpus:
    """The documents of a source: cropped, without nulls and empty ones, in source order."""

    def __init__(self, source: TextSource, files: Sequence[SourceFile], progress: Progress | None = None) -> None:
        self.source = source
        self._progress = progress
        self.files = files
        self.skipped = 0  # nulls and empty documents of the last walk
        self.holds_out_a_file = source.validation == "last_file" or (source.validation is None and len(files) > 1)
        if self.holds_out_a_file and len(files) < 2:
            raise DataError(
                f"data.validation: last_file, but the source has only {files[0].name}; give a fraction or more files"
            )

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def key(self) -> str:
        """Of the content and of everything that decides which document goes where."""
        unknown = [file.path for file in self.files if file.content is None]
        hashes = iter(content_sha256(unknown, self._progress))
        return self._key([[next(hashes)] if file.content is None else file.content for file in self.files])

    def key_at_hand(self) -> str | None:
        """The key, if it is known without reading large files; nothing is written."""
        hashes = []
        for file in self.files:
            known = file.content or [remembered_sha256(file.path)]
            if known == [None] and self.size <= _READ_AT_ONCE:
                known = [sha256_of_file(file.path)]
            hashes.append(known)
        return None if [None] in hashes else self._key(hashes)

    def key_of_0_1(self) -> str:
        """The key of version 0.1, under which its caches are found."""
        return self._key(
            [fingerprint_of_0_1(file.path) if file.content is None else file.content for file in self.files]
        )

    def is_older_than(self, cache: Path) -> bool:
        """Whether no local file has changed since that file was written, whatever its modification time says."""
        written = cache.stat().st_mtime_ns
        return all(file.path.stat().st_ctime_ns < written for file in self.files if file.content is None)

    def _key(self, contents: Sequence[Sequence[str | int | None]]) -> str:
        settings = self.source.model_dump(
            include={"column", "separator", "crop", "shuffled", "shuffle_seed", "validation"}
        )
        return digest(settings, [(file.name, content) for file, content in zip(self.files, contents, strict=True)])

    def parts(self, doing: str, *, only_train: bool = False) -> Iterator[Parts]:
        """Every document once, in source order."""
        count = None if self.holds_out_a_file else self._count
        self.skipped = 0  # only now: counting skips them too
        if count is None:
            for documents in self._documents(self.files[:-1], doing):
                yield Parts(documents, [])
            for documents in [] if only_train else self._documents(self.files[-1:], doing):
                yield Parts([], documents)
        elif count == 1:
            for documents in self._documents(self.files, doing):
                for document in documents:
                    train, held = cut_in_two(document, self._fraction)
                    yield Parts([train], [held])
        else:
            start = 0
            for documents in self._documents(self.files, doing):
                held_of = self._held_out[start : start + len(documents)].tolist()
                start += len(documents)
                if len(held_of) < len(documents):
                    raise self.changed_meanwhile()
                yield Parts(
                    [document for document, held in zip(documents, held_of, strict=True) if not held],
                    [document for document, held in zip(documents, held_of, strict=True) if held],
                )

    def changed_meanwhile(self) -> DataError:
        return DataError(f"{self.source.train} changed while it was being read; run it again when it is complete")

    @property
    def _fraction(self) -> float:
        return DEFAULT_FRACTION if self.source.validation is None else float(self.source.validation)

    @cached_property
    def _count(self) -> int:
        """The number of documents, which a fraction is of. It takes a reading of the source."""
        count = sum(len(documents) for documents in self._documents(self.files, "counting documents"))
        if count == 0:
            raise DataError(f"{self.source.train} has no text in it; check data.train, data.files and data.column")
        return count

    @cached_property
    def _held_out(self) -> np.ndarray:
        return held_out(self._count, self._fraction, None if self.source.shuffled else self.source.shuffle_seed)

    def _documents(self, files: Sequence[SourceFile], doing: str) -> Iterator[list[str]]:
        done = sum(file.size for file in self.files[: self.files.index(files[0])])
        for file in files:
            batches = read_batches(
                file.path, name=file.name, column=self.source.column, separator=self.source.separator
            )
            for share, documents in batches:
                if self._progress:
                    self._progress(doing, done + int(share * file.size), self.size)
                kept = [document[: self.source.crop] for document in documents if document]
                self.skipped += len(documents) - len(kept)
                if kept:
                    yield kept
            done += file.size
