"""A corpus: the files of a text source read as one sequence of documents, some of them held out for validation.

The source is the built-in text, a hub data set or local files. The held-out documents are computed from the seed.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from lapcli.data.cache import digest
from lapcli.data.file_formats import DOCUMENT_SUFFIXES, is_text, read_documents
from lapcli.data.source_files import expand_ranges, source_files
from lapcli.data.token_store import file_key
from lapcli.recipe.schema import UNKNOWN, TextSource
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

DEFAULT_FRACTION = 1 / 20


class Corpus:
    """The documents of a source: cropped, without nulls and empty ones, in source order."""

    def __init__(self, source: TextSource, files: Sequence[Path], progress: Progress | None = None) -> None:
        self.source, self.files, self._progress = source, files, progress
        self.skipped = 0  # nulls and empty documents in the last pass over the files
        self._holds_out_a_file = source.validation == "last_file" or (source.validation is None and len(files) > 1)
        if self._holds_out_a_file and len(files) < 2:
            raise DataError(
                f"data.validation: last_file, but the source has only {files[0]}; give a fraction or more files"
            )
        settings = source.model_dump(include={"column", "separator", "crop", "shuffled", "shuffle_seed", "validation"})
        keys = [file_key(path) for path in files]
        self._sizes = [int(size) for _, size, _ in keys]
        self.size = sum(self._sizes)
        self.key = digest(settings, keys)  # of the cache: the files, and all settings that change documents or split

    @property
    def seed(self) -> int | None:
        """The seed of the documents' order; None for a source in random order, which is kept."""
        return None if self.source.shuffled else self.source.shuffle_seed

    def documents(self, doing: str) -> Iterator[tuple[bool, str]]:
        """Yield every document, after whether it is held out; `doing` names the work for the progress bar."""
        if self._holds_out_a_file:
            yield from ((file is self.files[-1], document) for file, document in self._read(doing))
            return
        documents = (document for _, document in self._read(doing))
        fraction = DEFAULT_FRACTION if self.source.validation is None else float(self.source.validation)
        if self._count == 1:
            train, held = split_document(next(documents), fraction)
            yield from ((False, train), (True, held))
        else:
            try:
                yield from zip(held_out(self._count, fraction, self.seed).tolist(), documents, strict=True)
            except ValueError:  # another count than in the pass before
                raise DataError(f"{self.source.train} changed while it was being read; run it again") from None

    @cached_property
    def _count(self) -> int:
        """The number of documents, for a fraction of them; it takes a pass over the source."""
        count = sum(1 for _ in self._read("counting documents"))
        if count == 0:
            raise DataError(f"{self.source.train} has no text in it; check data.train, data.files and data.column")
        return count

    def _read(self, doing: str) -> Iterator[tuple[Path, str]]:
        done = self.skipped = 0
        for path, size in zip(self.files, self._sizes, strict=True):
            for fraction, documents in read_documents(path, column=self.source.column, separator=self.source.separator):
                if self._progress:
                    self._progress(doing, done + int(fraction * size), self.size)
                self.skipped += sum(not document for document in documents)
                yield from ((path, document[: self.source.crop]) for document in documents if document)
            done += size


def document_order(count: int, seed: int, purpose: str) -> np.ndarray:
    """Return a permutation of `count` documents, a different one for each purpose."""
    return np.random.default_rng([seed, *purpose.encode()]).permutation(count)


def held_out(count: int, fraction: float, seed: int | None) -> np.ndarray:
    """Return a mask of the validation documents, at least one and never all.

    They are the last of the shuffled order, or without a seed of the source's own order, which is random already.
    """
    held = min(max(math.ceil(count * fraction), 1), count - 1)
    order = np.arange(count) if seed is None else document_order(count, seed, "validation")
    mask = np.zeros(count, dtype=bool)
    mask[order[count - held :]] = True  # not [-held:]: with nothing to hold out that would be all
    return mask


def split_document(document: str, fraction: float) -> tuple[str, str]:
    """Split a document into a part to train on and a last part to validate on, after a newline or else a space."""
    if len(document) < 2:
        raise DataError("the text is a single character, which cannot be trained and validated on; give more text")
    target = min(max(round(len(document) * (1 - fraction)), 1), len(document) - 1)
    # The last one before the target, but none so far off that the held-out share would be a very different one.
    first = target - min(target, len(document) - target) // 2
    cut = document.rfind("\n", first, target) + 1 or document.rfind(" ", first, target) + 1 or target
    return document[:cut], document[cut:]


def open_corpus(source: TextSource, progress: Progress | None = None, *, download: bool = True) -> Corpus | None:
    """Open the source's files; without `download`, None if they would have to be downloaded or extracted."""
    if source.train == UNKNOWN:
        raise DataError("the run was imported, and what it was trained on is not known; name a text with --data")
    place = source.train, source.files, source.revision
    paths = source_files(*place, "text", DOCUMENT_SUFFIXES, progress, download=download)
    if paths is None:
        return None
    # A .md file is read if it is named, but skipped in a folder, where it mostly describes the data.
    is_text_file = [is_text(path.name) for path in paths]
    if source.separator is not None and not any(is_text_file):
        raise DataError("data.separator: none of the source's files is a text file; remove it")
    if source.column != "text" and all(is_text_file):
        raise DataError(f"data.column: text files have no columns such as {source.column}; remove it")
    return Corpus(source, paths, progress)


def hub_list(source: TextSource) -> tuple[str, list[str]]:
    """Return the data set's name and its files, in the order of the recipe."""
    return source.train.removeprefix("hub:"), expand_ranges(source.files or [])
