"""Checksums of cached files, by block: a block is verified by whoever reads it, when it is first read.

A cache may be tens of gigabytes, of which a step reads a few sequences; hashing whole files at every start would take
minutes. A block is 64 KiB, with a blake2b of 16 bytes: one shuffled batch of 256 sequences reads 16 to 32 MiB. The sums
stand in the folder's `index.json`, which carries a checksum of itself.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.cache import digest
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import write_text

BLOCK_BYTES = 1 << 16
DIGEST_BYTES = 16
INDEX = "index.json"
CHECKSUM = "checksum"  # of the index, in the index
DAMAGED = "damaged"  # a file that marks a folder to be built again


class BlockHasher:
    """The sums of a file that is written piece by piece."""

    def __init__(self) -> None:
        self._sums = bytearray()
        self._block = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._filled = 0

    def update(self, content: memoryview | bytes) -> None:
        content = memoryview(content).cast("B")
        while len(content):
            taken = content[: BLOCK_BYTES - self._filled]
            self._block.update(taken)
            self._filled += len(taken)
            content = content[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def hexdigest(self) -> str:
        """The sums of all blocks, one after the other; nothing can be added afterwards."""
        if self._filled:
            self._end_block()
        return self._sums.hex()

    def _end_block(self) -> None:
        self._sums += self._block.digest()
        self._block = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._filled = 0


class CheckedFile:
    """A file of numbers, memory-mapped. `vocab`: its numbers are token ids, all of them below this."""

    def __init__(self, path: Path, dtype: np.dtype, sums: str, vocab: int | None = None) -> None:
        self._path, self._vocab = path, vocab
        size = path.stat().st_size
        self._numbers: np.ndarray = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
        self._bytes = self._numbers.view(np.uint8)
        self._sums = bytes.fromhex(sums)
        self._unverified = np.ones(len(self._sums) // DIGEST_BYTES, dtype=bool)
        if len(self._sums) != -(-size // BLOCK_BYTES) * DIGEST_BYTES:
            raise damaged(path, "its size is not that of its checksums")

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A view of the numbers [start, stop); every block of it has been verified."""
        if stop > start:
            size = self._numbers.itemsize
            first, last = start * size // BLOCK_BYTES, (stop * size - 1) // BLOCK_BYTES
            for block in np.flatnonzero(self._unverified[first : last + 1]) + first:
                self._verify(int(block))
        return self._numbers[start:stop]

    def _verify(self, block: int) -> None:
        start = block * BLOCK_BYTES
        content = self._bytes[start : start + BLOCK_BYTES]
        expected = self._sums[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        if hashlib.blake2b(content.data, digest_size=DIGEST_BYTES).digest() != expected:
            raise damaged(self._path, f"bytes {start:,} to {start + len(content):,} do not match their checksum")
        if self._vocab is not None:
            highest = int(content.view(self._numbers.dtype).max())
            if highest >= self._vocab:
                raise damaged(self._path, f"it has the id {highest:,} in a vocabulary of {self._vocab:,}")
        self._unverified[block] = False


def damaged(path: Path, what: str) -> DataError:
    """The error for a damaged file of a cache folder, which the next start builds again."""
    try:
        (path.parent / DAMAGED).touch()
        step = "run the same command again, which builds it again"
    except OSError:
        step = f"remove the folder {path.parent} and run the same command again"
    return DataError(f"{path} is damaged ({what}); {step}")


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """`index.json` with a checksum of its own content."""
    write_text(folder / INDEX, json.dumps({**index, CHECKSUM: digest(index)}, indent=1))


def read_index(folder: Path) -> dict[str, Any]:
    """The content of `index.json`; ValueError or OSError if it is not what was written, or the folder is marked."""
    if (folder / DAMAGED).exists():
        raise ValueError(f"{folder} is marked as damaged")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    if not isinstance(index, dict) or index.pop(CHECKSUM, None) != digest(index):
        raise ValueError(f"{folder / INDEX} does not match its checksum")
    return index
