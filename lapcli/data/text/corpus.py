"""A corpus: the files of a text source read as one sequence of documents, split into training and validation.

The source is the built-in text, a hub data set or local files. The held-out documents and the order of the others are
computed from the seed.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lapcli.data.cache import digest
from lapcli.data.file_formats import DOCUMENT_SUFFIXES, is_text, read_documents
from lapcli.data.source_files import cached_hub_files, expand_ranges, hub_files, local_files
from lapcli.data.sources import RowSource
from lapcli.data.token_store import document_order, file_key
from lapcli.recipe.data_sources import find_source
from lapcli.recipe.schema import UNKNOWN, TextSource
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

DEFAULT_FRACTION = 1 / 20


class SplitDocuments(NamedTuple):
    """Some documents in source order, split into those to train on and those held out."""

    train: list[str]
    validation: list[str]


class Corpus:
    """The documents of a source: cropped, without nulls and empty ones, in source order."""

    def __init__(
        self, source: TextSource, names: Sequence[str], paths: Sequence[Path], progress: Progress | None = None
    ) -> None:
        """`names` are those of the files within the source, as in the recipe and error messages."""
        self.source, self._progress = source, progress
        self.files = list(zip(names, paths, strict=True))
        self.skipped = 0  # nulls and empty documents in the last pass over the files
        self.holds_out_a_file = source.validation == "last_file" or (source.validation is None and len(names) > 1)
        if self.holds_out_a_file and len(names) < 2:
            raise DataError(
                f"data.validation: last_file, but the source has only {names[0]}; give a fraction or more files"
            )
        settings = source.model_dump(include={"column", "separator", "crop", "shuffled", "shuffle_seed", "validation"})
        files = [file_key(name, path) for name, path in self.files]
        self.sizes = [int(size) for _, _, size, _ in files]
        self.key = digest(settings, files)  # of the cache: the files, and all settings that change documents or split

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def parts(self, doing: str, *, only_train: bool = False) -> Iterator[SplitDocuments]:
        """Yield every document once, in source order; `doing` names the work for the progress bar."""
        count = None if self.holds_out_a_file else self._count
        self.skipped = 0  # after counting, which counts skipped documents too
        if count is None:
            for documents in self._documents(doing, slice(None, -1)):
                yield SplitDocuments(documents, [])
            for documents in [] if only_train else self._documents(doing, slice(-1, None)):
                yield SplitDocuments([], documents)
        elif count == 1:
            for documents in self._documents(doing):
                for document in documents:
                    train, held = split_document(document, self._fraction)
                    yield SplitDocuments([train], [held])
        else:
            start = 0
            for documents in self._documents(doing):
                held_of = self._held_out[start : start + len(documents)].tolist()
                start += len(documents)
                if len(held_of) < len(documents):
                    raise self.changed_meanwhile()
                yield SplitDocuments(
                    [document for document, held in zip(documents, held_of, strict=True) if not held],
                    [document for document, held in zip(documents, held_of, strict=True) if held],
                )

    def changed_meanwhile(self) -> DataError:
        return DataError(
            f"{self.source.train} changed while it was being read; run the command again when it is complete"
        )

    @property
    def _fraction(self) -> float:
        return DEFAULT_FRACTION if self.source.validation is None else float(self.source.validation)

    @cached_property
    def _count(self) -> int:
        """The number of documents, for a fraction of them; it takes a pass over the source."""
        count = sum(len(documents) for documents in self._documents("counting documents"))
        if count == 0:
            raise DataError(f"{self.source.train} has no text in it; check data.train, data.files and data.column")
        return count

    @cached_property
    def _held_out(self) -> np.ndarray:
        return held_out(self._count, self._fraction, None if self.source.shuffled else self.source.shuffle_seed)

    def _documents(self, doing: str, chosen: slice = slice(None)) -> Iterator[list[str]]:
        starts = np.cumsum([0, *self.sizes]).tolist()
        for (name, path), size, done in list(zip(self.files, self.sizes, starts, strict=False))[chosen]:
            batches = read_documents(path, name=name, column=self.source.column, separator=self.source.separator)
            for fraction, documents in batches:
                if self._progress:
                    self._progress(doing, done + int(fraction * size), self.size)
                cropped = [document[: self.source.crop] for document in documents if document]
                self.skipped += len(documents) - len(cropped)
                if cropped:
                    yield cropped


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
    for mark in ("\n", " "):
        before = document.rfind(mark, 0, target) + 1
        # A mark at the very end is not searched: the held-out part would be empty.
        after = document.find(mark, target, -1) + 1
        # The nearer of both, but none so far off that the held-out share would be a very different one.
        near = [cut for cut in (before, after) if cut and abs(cut - target) <= min(target, len(document) - target) / 2]
        if near:
            target = min(near, key=lambda cut: abs(cut - target))
            break
    return document[:target], document[target:]


def open_corpus(source: TextSource, progress: Progress | None = None) -> Corpus:
    """Open the source's files, downloading missing ones; no text is read yet."""
    if source.train == UNKNOWN:
        raise DataError("the run was imported, and what it was trained on is not known; name a text with --data")
    if named := _row_source(source):
        text = named.file()
        return Corpus(source, [text.name], [text], progress)
    if source.train.startswith("hub:"):
        repository, names = hub_list(source)
        return Corpus(source, names, hub_files(repository, names, source.revision, progress), progress)
    paths = local_files(source.train, source.files)
    folder = Path(source.train).expanduser()
    names = [path.name if folder.is_file() else path.relative_to(folder).as_posix() for path in paths]
    _check(source, names)
    return Corpus(source, names, paths, progress)


def corpus_at_hand(source: TextSource) -> Corpus | None:
    """Open the corpus; None if something would have to be downloaded or extracted."""
    if (named := _row_source(source)) and not named.folder().is_dir():
        return None
    if source.train.startswith("hub:"):
        repository, names = hub_list(source)
        if cached_hub_files(repository, names, source.revision) is None:
            return None
    return open_corpus(source)


def _row_source(source: TextSource) -> RowSource | None:
    named = find_source(source.train, "text")
    return named if isinstance(named, RowSource) else None


def hub_list(source: TextSource) -> tuple[str, list[str]]:
    """Return the data set's name and its files, in the order of the recipe."""
    names = expand_ranges(source.files or [])
    _check(source, names)
    return source.train.removeprefix("hub:"), names


def _check(source: TextSource, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        # A .md file is read if it is named, but skipped in a folder, where it mostly describes the data.
        if not name.endswith((*DOCUMENT_SUFFIXES, ".md")):
            raise DataError(
                f"data.files: {name} has a format that is not read here; expected {', '.join(DOCUMENT_SUFFIXES)}"
            )
        if count > 1:
            raise DataError(f"data.files: {name} is named twice, so that validation would not be held out; remove one")
    if source.separator is not None and not any(map(is_text, names)):
        raise DataError("data.separator: none of the source's files is a text file; remove it")
    if source.column != "text" and all(map(is_text, names)):
        raise DataError(f"data.column: text files have no columns such as {source.column}; remove it")
