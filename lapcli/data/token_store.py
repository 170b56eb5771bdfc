"""The token store: documents or conversations as token ids on disk, written once and memory-mapped.

FOLDER/{index.json, tokens-00000.bin, ..., documents-00000.bin, ..., targets-00000.bin, ...}

`tokens` are the ids of all documents in source order, `documents` has a row of numbers for each document, of which the
first is its end among the tokens, and `targets` has a flag for each token, for conversations alone. A stream is cut
into shards; the index has each shard's sha256, which is verified when the shard is first read. The cache key of a
folder is the name, size and modification time of each source file, and the settings.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from lapcli.data.cache import digest
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file

INDEX = "index.json"
SHARD_TOKENS = 1 << 27  # 256 MiB of 16-bit ids

Shard = Sequence[Any]  # file name, numbers in it and sha256


def token_dtype(vocab: int) -> np.dtype:
    """Return the dtype of ids, little-endian on every machine, so that hashes and copied caches agree."""
    # A vocabulary of 65,536, as nanochat's, still fits: its highest id is 65,535.
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def file_key(path: Path) -> list[str | int]:
    """Return the part of a cache key that stands for a source file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); check the source's files") from None
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return index


def has_index(folder: Path) -> bool:
    """Return whether a folder is complete; its shards are verified when they are read."""
    return (folder / INDEX).is_file()


class ShardWriter:
    """Appends numbers to NAME-00000.bin, NAME-00001.bin, ... and hashes what it writes."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._folder, self._name, self.dtype = folder, name, dtype
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self.shards: list[tuple[str, int, str]] = []  # the last one's sha256 is known when it is full or closed
        self.count = 0

    def append(self, numbers: Any) -> None:
        numbers = np.ascontiguousarray(numbers, self.dtype)
        self.count += len(numbers)
        while len(numbers):
            if self._file is None or self.shards[-1][1] == SHARD_TOKENS:
                self.close()
                self.shards.append((f"{self._name}-{len(self.shards):05d}.bin", 0, ""))
                self._file, self._hash = (self._folder / self.shards[-1][0]).open("wb"), hashlib.sha256()
            name, filled, _ = self.shards[-1]
            taken = numbers[: SHARD_TOKENS - filled]
            self._file.write(taken.data)
            self._hash.update(taken.data)
            self.shards[-1] = (name, filled + len(taken), "")
            numbers = numbers[len(taken) :]

    def close(self) -> tuple[str, list[tuple[str, int, str]]]:
        """Close the last file; return the stream's entry in the index."""
        if self._file is not None:
            self._file.close()
            self.shards[-1] = (*self.shards[-1][:2], self._hash.hexdigest())
            self._file = None
        return self.dtype.str, self.shards


class TokenStream:
    """Shards as one stream of numbers, read on demand."""

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype) -> None:
        self._folder, self._shards, self._dtype = folder, shards, dtype
        self._ends = np.cumsum([count for _, count, _ in shards], dtype=np.int64)
        self._opened: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Return an int64 copy of ids [start, start + count), across shard borders."""
        return self.read_raw(start, count).astype(np.int64)

    def read_raw(self, start: int, count: int) -> np.ndarray:
        """Return numbers in the dtype of the files; a view of the file if they are all in one shard."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start:,} to {start + count:,} of a stream of {len(self):,}")
        pieces = [self._piece(*span) for span in spans(self._ends, start, count)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self._dtype), *pieces])

    def _piece(self, number: int, first: int, end: int) -> np.ndarray:
        """Read from a shard, which is verified when it is first mapped; a damaged one is rebuilt by the next start."""
        if number not in self._opened:
            name, _, sha256 = self._shards[number]
            path = self._folder / name
            if not path.is_file() or sha256_of_file(path) != sha256:
                (self._folder / INDEX).unlink(missing_ok=True)
                raise DataError(f"{path} is damaged (its sha256 differs); run the same command again to rebuild it")
            self._opened[number] = np.memmap(path, dtype=self._dtype, mode="r")
        return self._opened[number][first:end]


def spans(ends: np.ndarray, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts that [start, start + count) covers of consecutive pieces: number, first and end within it."""
    # side="right": a position at a border belongs to the piece that begins there.
    number = int(np.searchsorted(ends, start, side="right"))
    end = start + count
    while start < end:
        before, after = int(ends[number - 1]) if number else 0, int(ends[number])
        yield number, start - before, min(end, after) - before
        start, number = after, number + 1


class StoreWriter:
    """Writes documents in order: `append` adds tokens to the current one, `end` ends it with its numbers."""

    def __init__(self, folder: Path, vocab: int, *, columns: int, has_targets: bool = False) -> None:
        self._folder, self._columns = folder, columns
        dtypes = {"tokens": token_dtype(vocab), "documents": np.dtype("<i8")}
        dtypes |= {"targets": np.dtype(bool)} if has_targets else {}
        self._streams = {name: ShardWriter(folder, name, dtype) for name, dtype in dtypes.items()}
        self.documents = self.tokens = 0

    def append(self, ids: Any, targets: Any = None) -> None:
        self._streams["tokens"].append(ids)
        self.tokens += len(ids)
        if targets is not None:
            self._streams["targets"].append(targets)

    def end(self, *numbers: int) -> None:
        self._streams["documents"].append([self.tokens, *numbers])
        self.documents += 1

    def close(self, *key: object, **facts: Any) -> None:
        """Write the index; the store's identity is a hash of all shards and `key`."""
        streams = {name: writer.close() for name, writer in self._streams.items()}
        hashes = {name: [sha256 for _, _, sha256 in shards] for name, (_, shards) in streams.items()}
        index = {"identity": digest(hashes, *key), "columns": self._columns, "streams": streams}
        write_index(self._folder, {**index, **facts})


class TokenStore:
    """Documents of a folder, in source order; `numbers` has a row for each, beginning with its end."""

    def __init__(self, folder: Path) -> None:
        self.index = read_index(folder)
        self.identity: str = self.index["identity"]
        streams = {
            name: TokenStream(folder, shards, np.dtype(dtype))
            for name, (dtype, shards) in self.index["streams"].items()
        }
        self.tokens, self._targets, numbers = streams["tokens"], streams.get("targets"), streams["documents"]
        self.numbers = numbers.read_raw(0, len(numbers)).reshape(-1, self.index["columns"])
        self.lengths = np.diff(self.numbers[:, 0], prepend=0)

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, and which of them the assistant learns."""
        assert self._targets is not None
        length = int(self.lengths[number])
        start = int(self.numbers[number, 0]) - length
        return self.tokens.read_raw(start, length), self._targets.read_raw(start, length)


class DocumentStream(TokenStream):
    """Documents of a store, one after the other in the given order, as one stream of ids."""

    def __init__(self, store: TokenStore, documents: np.ndarray) -> None:
        self._tokens, self._dtype = store.tokens, store.tokens._dtype
        # Documents that follow each other in the store too are one piece: a source in random order is a single one.
        last = np.append(np.diff(documents) != 1, True)
        first = np.append(True, last[:-1])[: len(documents)]
        self._starts = (store.numbers[:, 0] - store.lengths)[documents[first]]
        self._ends = np.cumsum(store.numbers[documents[last[: len(documents)]], 0] - self._starts)

    def _piece(self, number: int, first: int, end: int) -> np.ndarray:
        return self._tokens.read_raw(int(self._starts[number]) + first, end - first)
