"""Token ids on disk: written once into shards of bounded size, and read as one memory-mapped stream.

FOLDER/{index.json, NAME-00000.bin, NAME-00001.bin, ...}

Text has the streams `train` and `validation`; conversations have `tokens` and `targets`, one flag for each token. The
index has each shard's sha256, which is verified when the shard is first read. The cache key of a folder is the name,
size and modification time of each source file, and the settings.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import remove, sha256_of_file

INDEX = "index.json"
SHARD_TOKENS = 1 << 27  # 256 MiB of 16-bit ids
ENCODED_AT_ONCE = 1 << 22  # characters: enough work for all cores, few enough for memory

Shard = Sequence[Any]  # file name, numbers in it and sha256


def token_dtype(vocab: int) -> np.dtype:
    """Return the dtype of ids, little-endian on every machine, so that hashes and copied caches agree."""
    # A vocabulary of 65,536, as nanochat's, still fits: its highest id is 65,535.
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def file_key(name: str, path: Path) -> list[str | int]:
    """Return the part of a cache key that stands for a source file; `name` is its name within the source."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); check the source's files") from None
    return [name, str(path.resolve()), status.st_size, status.st_mtime_ns]


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return index


def is_whole(folder: Path) -> bool:
    """Return whether a folder has its index and shards of the right sizes; contents are verified when they are read."""
    try:
        return all(
            (folder / name).stat().st_size == count * np.dtype(dtype).itemsize
            for dtype, shards in read_index(folder)["streams"].values()
            for name, count, _ in shards
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_stream(folder: Path, name: str) -> "TokenStream":
    dtype, shards = read_index(folder)["streams"][name]
    return TokenStream(folder, shards, np.dtype(dtype))


class ShardWriter:
    """Appends numbers to NAME-00000.bin, NAME-00001.bin, ... and hashes what it writes."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._folder, self._name, self.dtype = folder, name, dtype
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self.shards: list[tuple[str, int, str]] = []  # the last one's sha256 is known when it is full or closed
        self.count = 0

    def append(self, numbers: np.ndarray) -> None:
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
        self._starts = np.cumsum([0, *(count for _, count, _ in shards)])
        self._opened: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return an int64 copy of ids [start, start + count), across shard borders."""
        return self.read_raw(start, count).astype(np.int64)

    def read_raw(self, start: int, count: int) -> np.ndarray:
        """Return numbers in the dtype of the files; a view of the file if they are all in one shard."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start:,} to {start + count:,} of a stream of {len(self):,}")
        if count == 0:
            return np.empty(0, dtype=self._dtype)
        # side="right": a token at a border belongs to the shard that begins there.
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        while count:
            offset = start - int(self._starts[shard])
            pieces.append(self._open(shard)[offset : offset + count])
            start, count, shard = start + len(pieces[-1]), count - len(pieces[-1]), shard + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _open(self, number: int) -> np.ndarray:
        """Map a shard, after verifying it; one that is damaged is built again by the next start."""
        if number not in self._opened:
            name, _, sha256 = self._shards[number]
            path = self._folder / name
            if sha256_of_file(path) != sha256:
                remove(self._folder / INDEX, or_leave=True)
                raise DataError(f"{path} is damaged (its sha256 differs); run the same command again to rebuild it")
            self._opened[number] = np.memmap(path, dtype=self._dtype, mode="r")
        return self._opened[number]


def document_order(count: int, seed: int, purpose: str) -> np.ndarray:
    """Return a permutation of `count` documents, a different one for each purpose."""
    return np.random.default_rng([seed, *purpose.encode()]).permutation(count)


class DocumentWriter:
    """Encodes documents, each after a BOS, into the stream `name`; `seed` shuffles them, None keeps their order."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, seed: int | None) -> None:
        self._folder, self._name, self._tokenizer, self._seed = folder, name, tokenizer, seed
        first_name = name if seed is None else f"unshuffled-{name}"
        self._writer = ShardWriter(folder, first_name, token_dtype(tokenizer.vocab_size))
        # 8 bytes a document; in a list of ints it would be about 40.
        self._starts = array("q")  # position of each document's first token
        self._waiting: list[tuple[bool, str]] = []  # pieces, and whether each begins a document
        self._waiting_characters = 0

    @property
    def documents(self) -> int:
        return len(self._starts)

    def add(self, documents: Iterable[str]) -> None:
        for document in documents:
            for number, piece in enumerate(self._tokenizer.pieces(document)):
                self._waiting.append((number == 0, piece))
                self._waiting_characters += len(piece)
                if self._waiting_characters > ENCODED_AT_ONCE:
                    self._encode()

    def finish(self) -> tuple[str, list[tuple[str, int, str]]]:
        """Write what is left; return the stream's entry in the index."""
        self._encode()
        entry = self._writer.close()
        return entry if self._seed is None else self._shuffle(self._seed)

    def _encode(self) -> None:
        encoded = self._tokenizer.encode_batch([piece for _, piece in self._waiting])
        for (begins, _), ids in zip(self._waiting, encoded, strict=True):
            # BOS only before the first piece: the later ones continue the document.
            if begins:
                self._starts.append(self._writer.count)
                self._writer.append(np.array([self._tokenizer.bos]))
            self._writer.append(np.array(ids, dtype=self._writer.dtype))
        self._waiting, self._waiting_characters = [], 0

    def _shuffle(self, seed: int) -> tuple[str, list[tuple[str, int, str]]]:
        """Copy documents from a memory map in source order to the final shards: the corpus may not fit into memory."""
        source = TokenStream(self._folder, self._writer.shards, self._writer.dtype)
        ends = np.append(np.frombuffer(self._starts, dtype=np.int64)[1:], len(source))
        final = ShardWriter(self._folder, self._name, self._writer.dtype)
        for document in document_order(self.documents, seed, self._name):
            start = self._starts[document]
            final.append(source.read_raw(start, int(ends[document]) - start))
        entry = final.close()
        for name, _, _ in self._writer.shards:
            (self._folder / name).unlink()
        return entry
