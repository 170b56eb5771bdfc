"""Text sources: the built-in text, a hub data set or local files, as one sequence of documents in two parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lapcli.data.builtin import builtin_folder, builtin_sha256, builtin_text
from lapcli.data.cache import digest
from lapcli.data.file_lists import check_file_list, expand_ranges, local_files
from lapcli.data.fingerprint import hub_fingerprint, local_fingerprint
from lapcli.data.formats import is_text, read_batches
from lapcli.data.hub import cached_hub_files, hub_files
from lapcli.data.split import cut_in_two, held_out
from lapcli.errors import DataError
from lapcli.recipe.schema import TextSource

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

DEFAULT_FRACTION = 1 / 20


@dataclass(frozen=True)
class SourceFile:
    name: str  # within the source, as the recipe and error messages call it
    path: Path
    size: int
    fingerprint: tuple[str | int, ...]


class Parts(NamedTuple):
    """Some documents in source order, those to train on and those held out."""

    train: list[str]
    validation: list[str]


class Corpus:
    """The documents of a source: cropped, without nulls and empty ones, in source order."""

    def __init__(self, source: TextSource, files: Sequence[SourceFile]) -> None:
        self.source = source
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

    @property
    def key(self) -> str:
        """Of the content and of everything that decides which document goes where."""
        settings = self.source.model_dump(
            include={"column", "separator", "crop", "shuffled", "shuffle_seed", "validation"}
        )
        return digest(settings, [(file.name, file.fingerprint) for file in self.files])

    def parts(self, doing: str, progress: Progress | None = None, *, only_train: bool = False) -> Iterator[Parts]:
        """Every document once, in source order."""
        self.skipped = 0
        if self.holds_out_a_file:
            for documents in self._documents(self.files[:-1], doing, progress):
                yield Parts(documents, [])
            for documents in [] if only_train else self._documents(self.files[-1:], doing, progress):
                yield Parts([], documents)
        elif self._count == 1:
            for documents in self._documents(self.files, doing, progress):
                for document in documents:
                    train, held = cut_in_two(document, self._fraction)
                    yield Parts([train], [held])
        else:
            start = 0
            for documents in self._documents(self.files, doing, progress):
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
        count = sum(len(documents) for documents in self._documents(self.files, "counting documents", None))
        if count == 0:
            raise DataError(f"{self.source.train} has no text in it; check data.train, data.files and data.column")
        return count

    @cached_property
    def _held_out(self) -> np.ndarray:
        return held_out(self._count, self._fraction, None if self.source.shuffled else self.source.shuffle_seed)

    def _documents(self, files: Sequence[SourceFile], doing: str, progress: Progress | None) -> Iterator[list[str]]:
        done = sum(file.size for file in self.files[: self.files.index(files[0])])
        for file in files:
            batches = read_batches(
                file.path, name=file.name, column=self.source.column, separator=self.source.separator
            )
            for share, documents in batches:
                if progress:
                    progress(doing, done + int(share * file.size), self.size)
                kept = [document[: self.source.crop] for document in documents if document]
                self.skipped += len(documents) - len(kept)
                if kept:
                    yield kept
            done += file.size


def open_corpus(source: TextSource, progress: Progress | None = None) -> Corpus:
    """The source's files, downloaded where they are missing; nothing of a file's text is read."""
    if source.train == "builtin":
        path = builtin_text()
        return Corpus(source, [SourceFile(path.name, path, path.stat().st_size, (builtin_sha256(path),))])
    if source.train.startswith("hub:"):
        repository, names = hub_list(source)
        return _hub_corpus(source, names, hub_files(repository, names, source.revision, progress))
    paths = local_files(source.train, source.files)
    folder = Path(source.train).expanduser()
    names = [path.name if folder.is_file() else path.relative_to(folder).as_posix() for path in paths]
    _check(source, names)
    try:
        prints = [tuple(local_fingerprint(path)) for path in paths]
        sizes = [path.stat().st_size for path in paths]
    except OSError as error:
        raise DataError(f"cannot read {error.filename} ({error.strerror}); check data.train") from None
    return Corpus(source, [SourceFile(*file) for file in zip(names, paths, sizes, prints, strict=True)])


def corpus_at_hand(source: TextSource) -> Corpus | None:
    """The corpus if nothing need be downloaded or extracted for it."""
    if source.train == "builtin" and not builtin_folder().is_dir():
        return None
    if source.train.startswith("hub:"):
        repository, names = hub_list(source)
        paths = cached_hub_files(repository, names, source.revision)
        return _hub_corpus(source, names, paths) if paths else None
    return open_corpus(source)


def hub_list(source: TextSource) -> tuple[str, list[str]]:
    names = expand_ranges(source.files or [])
    _check(source, names)
    return source.train.removeprefix("hub:"), names


def _hub_corpus(source: TextSource, names: Sequence[str], paths: Sequence[Path]) -> Corpus:
    prints = [tuple(hub_fingerprint(path)) for path in paths]
    sizes = [path.stat().st_size for path in paths]
    return Corpus(source, [SourceFile(*file) for file in zip(names, paths, sizes, prints, strict=True)])


def _check(source: TextSource, names: Sequence[str]) -> None:
    check_file_list(names)
    if source.separator is not None and not any(map(is_text, names)):
        raise DataError("data.separator: none of the source's files is a text file; remove it")
    if source.column != "text" and all(map(is_text, names)):
        raise DataError(f"data.column: text files have no columns such as {source.column}; remove it")
