"""The token store: documents or conversations as token ids on disk, written once and memory-mapped.

PART/{index.json, tokens.bin, documents.bin}, and targets.bin for conversations

A store is a sequence of parts, one for each source file (or for several small ones). `tokens` are the ids of its
documents, `documents` has a row of numbers per document, the first of which is its length, and `targets` has a flag
for each token. The index has the sha256 of each file, which is verified when the file is first opened. The cache key of
a part is the name, size and modification time of its source files, and the settings: parts are built, resumed and
reused independently, and their bytes do not depend on the process or the time of the build.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.files import digest
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file, write_json

INDEX = "index.json"
TOKENS, DOCUMENTS, TARGETS = "tokens.bin", "documents.bin", "targets.bin"
MOST_OPEN = 256  # mapped files of a store: each takes a descriptor, of which a process often has 1024


def file_key(path: Path) -> list[str | int]:
    """Return the part of a cache key that stands for a source file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); check the source's files") from None
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def has_index(folder: Path) -> bool:
    """Return whether a part is complete; its files are verified when they are opened."""
    return (folder / INDEX).is_file()


class PartWriter:
    """Writes documents in order: `append` adds tokens to the current document, `end` completes it with its numbers."""

    def __init__(self, folder: Path, vocab: int, *, columns: int = 1, has_targets: bool = False) -> None:
        self._folder, self._columns = folder, columns
        # Little-endian on every machine, so that hashes and copied caches agree. A vocabulary of 65,536, as nanochat's,
        # still fits 16 bits: the highest id is 65,535.
        self._dtypes = {TOKENS: "<u2" if vocab <= 1 << 16 else "<u4", DOCUMENTS: "<i8"}
        self._dtypes |= {TARGETS: "|b1"} if has_targets else {}
        self._files = {name: (folder / name).open("wb") for name in self._dtypes}
        self._length = self.tokens = self.documents = 0

    def append(self, ids: Any, targets: Any = None) -> None:
        self._write(TOKENS, ids)
        self._length += len(ids)
        if targets is not None:
            self._write(TARGETS, targets)

    def end(self, *numbers: int) -> None:
        self._write(DOCUMENTS, [self._length, *numbers])
        self.documents, self.tokens, self._length = self.documents + 1, self.tokens + self._length, 0

    def close(self, **facts: Any) -> None:
        """Write the index, including `facts`."""
        for file in self._files.values():
            file.close()
        files = {name: [dtype, sha256_of_file(self._folder / name)] for name, dtype in self._dtypes.items()}
        write_json(self._folder / INDEX, {"tokens": self.tokens, "columns": self._columns, "files": files, **facts})

    def _write(self, name: str, numbers: Any) -> None:
        self._files[name].write(np.ascontiguousarray(numbers, self._dtypes[name]).data)


class TokenStore:
    """The documents of all parts, in order; `numbers` has a row for each, beginning with its length."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self.parts = parts
        self.indexes = [json.loads((part / INDEX).read_text(encoding="utf-8")) for part in parts]
        self.identity = digest([index["files"] for index in self.indexes])
        self._opened: dict[tuple[int, str], np.ndarray] = {}
        self._verified: set[Path] = set()
        self._part_ends = np.cumsum([index["tokens"] for index in self.indexes])
        numbers = [self._open(part, DOCUMENTS, np.fromfile) for part in range(len(parts))]
        self.numbers = np.concatenate(numbers).reshape(-1, self.indexes[0]["columns"])
        self.counts = [len(of_part) // self.numbers.shape[1] for of_part in numbers]
        self.lengths = self.numbers[:, 0]
        self.ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, start: int, count: int, name: str = TOKENS) -> np.ndarray:
        """Return tokens [start, start + count) or their targets; a view of the file if they are in one part."""
        pieces = []
        for part, first, end in spans(self._part_ends, start, count):
            if (part, name) not in self._opened:
                if len(self._opened) == MOST_OPEN:
                    self._opened.pop(next(iter(self._opened)))  # the oldest
                self._opened[part, name] = self._open(part, name, np.memmap)
            pieces.append(self._opened[part, name][first:end])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, and which of them are targets of the assistant."""
        place = int(self.ends[number] - self.lengths[number]), int(self.lengths[number])
        return self.read(*place), self.read(*place, TARGETS)

    def _open(self, part: int, name: str, read: Any) -> np.ndarray:
        """Read or map a file, verified at the first time; the next start rebuilds the part of a damaged file."""
        path, (dtype, sha256) = self.parts[part] / name, self.indexes[part]["files"][name]
        if path not in self._verified and (not path.is_file() or sha256_of_file(path) != sha256):
            (self.parts[part] / INDEX).unlink(missing_ok=True)
            raise DataError(f"{path} is damaged (its sha256 differs); run the same command again to rebuild it")
        self._verified.add(path)
        array: np.ndarray = read(path, dtype=dtype)
        return array


class TokenStream:
    """Documents of a store, one after the other in the given order, as one stream of ids."""

    def __init__(self, store: TokenStore, documents: np.ndarray) -> None:
        self._store = store
        # Documents that are also adjacent in the store form one piece: a shuffled source is a single piece.
        last = np.append(np.diff(documents) != 1, True)[: len(documents)]
        first = np.append(True, last[:-1])[: len(documents)]
        self._starts = (store.ends - store.lengths)[documents[first]]
        self._ends = np.cumsum(store.ends[documents[last]] - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Return ids [start, start + count) in the dtype of the files."""
        pieces = [
            self._store.read(int(self._starts[piece]) + first, end - first)
            for piece, first, end in spans(self._ends, start, count)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def spans(ends: np.ndarray, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the overlap of [start, start + count) with consecutive pieces: piece number, start and end within it."""
    # side="right": a boundary position belongs to the piece that begins there.
    number = int(np.searchsorted(ends, start, side="right"))
    end = start + count
    while start < end:
        before, after = int(ends[number - 1]) if number else 0, int(ends[number])
        yield number, start - before, min(end, after) - before
        start, number = after, number + 1
