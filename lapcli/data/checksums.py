"""Checksums: of cached files by block, verified when a block is first read; and of source files, cached.

A cache may be tens of gigabytes, of which a step reads a few sequences; hashing whole files at every start would take
minutes. A block is 64 KiB, with a blake2b of 16 bytes: one shuffled batch of 256 sequences reads 16 to 32 MiB. The sums
are in the folder's `index.json`, which has a checksum of itself.

Cache keys identify a source file by its content. Hashing 100 GB takes minutes as well, so a hash is remembered as long
as the file has the same size, inode, modification time and change time. A copy or an archive can restore a
modification time, but nothing can restore a change time.
"""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.cache import digest, locked
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import make_folder, open_to_read, open_to_write, read_text, write_json, write_text
from lapcli.runtime.progress import Progress

BLOCK_BYTES = 1 << 16
DIGEST_BYTES = 16
INDEX = "index.json"
CHECKSUM = "checksum"  # of the index, in the index
DAMAGED = "damaged"  # a file that marks a folder to be built again


class BlockHasher:
    """Computes the sums of a file that is written piece by piece."""

    def __init__(self) -> None:
        self._sums = bytearray()
        self._block = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._filled = 0

    def update(self, content: memoryview | bytes) -> None:
        content = memoryview(content).cast("B")  # to bytes: slices of token ids would count ids
        while len(content):
            taken = content[: BLOCK_BYTES - self._filled]
            self._block.update(taken)
            self._filled += len(taken)
            content = content[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def hexdigest(self) -> str:
        """Return the concatenated sums of all blocks; no `update` may follow."""
        if self._filled:
            self._end_block()
        return self._sums.hex()

    def _end_block(self) -> None:
        self._sums += self._block.digest()
        self._block = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._filled = 0


class CheckedFile:
    """A memory-mapped file of numbers, verified by block. With `vocab` they are token ids, all below it."""

    def __init__(self, path: Path, dtype: np.dtype, sums: str, vocab: int | None = None) -> None:
        self._path, self._vocab = path, vocab
        size = path.stat().st_size
        # An empty file cannot be mapped.
        self._numbers: np.ndarray = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
        self._bytes = self._numbers.view(np.uint8)
        self._sums = bytes.fromhex(sums)
        self._unverified = np.ones(len(self._sums) // DIGEST_BYTES, dtype=bool)
        if len(self._sums) != -(-size // BLOCK_BYTES) * DIGEST_BYTES:
            raise damage_error(path, "its size does not match its checksums")

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a view of the numbers [start, stop), after verifying its blocks."""
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
            raise damage_error(self._path, f"bytes {start:,} to {start + len(content):,} do not match their checksum")
        if self._vocab is not None:
            highest = int(content.view(self._numbers.dtype).max())
            if highest >= self._vocab:
                raise damage_error(
                    self._path, f"it holds the id {highest:,}, but the vocabulary has {self._vocab:,} tokens"
                )
        self._unverified[block] = False


def damage_error(path: Path, what: str) -> DataError:
    """Return the error for a damaged file of a cache folder, and mark the folder to be rebuilt at the next start."""
    try:
        open_to_write(path.parent / DAMAGED).close()
        step = "run the same command again to rebuild it"
    except OSError:
        step = f"remove the folder {path.parent} and run the same command again"
    return DataError(f"{path} is damaged ({what}); {step}")


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Write `index.json` with a checksum of its own content."""
    write_text(folder / INDEX, json.dumps({**index, CHECKSUM: digest(index)}, indent=1))


def read_index(folder: Path) -> dict[str, Any]:
    """Read `index.json`; ValueError or OSError if it is damaged or the folder is marked as damaged."""
    if (folder / DAMAGED).exists():
        raise ValueError(f"{folder} is marked as damaged")
    index = json.loads(read_text(folder / INDEX))
    if not isinstance(index, dict) or index.pop(CHECKSUM, None) != digest(index):
        raise ValueError(f"{folder / INDEX} does not match its checksum")
    return index


#: Resolution of change times, at worst: a file that changed within it before hashing may change again unnoticed.
_TICK_NS = 1_000_000_000
_READ_AT_ONCE = 1 << 22
_SHA256 = re.compile(r"[0-9a-f]{64}")


def content_sha256(paths: Sequence[Path], progress: Progress | None = None) -> list[str]:
    """Return the sha256 of each file; files whose hash is remembered are not read."""
    total, done, hashes = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
        hashes.append(_content_sha256(path, progress, done, total))
        done += path.stat().st_size
    return hashes


def remembered_sha256(path: Path) -> str | None:
    """Return the sha256 of a file if it is remembered, without reading the file."""
    try:
        record = json.loads(read_text(_memory(path)))
        if record.pop(CHECKSUM, None) != digest(record):
            return None
        return str(record["sha256"]) if record["status"] == _status(path) else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def hub_fingerprint(path: Path) -> list[str | int] | None:
    """Return the hub's content hash, the name of the blob that its cache links to; None if the cache has copies."""
    return [path.resolve().name, path.stat().st_size] if path.is_symlink() else None


def refuse_damaged_blobs(paths: Sequence[Path], progress: Progress | None = None) -> None:
    """Raise DataError for a file of the hub whose content does not match its name, if that is its sha256.

    Called before the files are read. Small text files are named by another hash and are skipped.
    """
    blobs = [path for path in paths if path.is_symlink() and _SHA256.fullmatch(path.resolve().name)]
    for path, sha256 in zip(blobs, content_sha256(blobs, progress), strict=True):
        if sha256 != path.resolve().name:
            raise DataError(
                f"{path.name} is damaged: {path.resolve()} does not have the sha256 of its name; remove that file, "
                "then run `lap fetch RECIPE`"
            )


def _content_sha256(path: Path, progress: Progress | None, done: int, total: int) -> str:
    if remembered := remembered_sha256(path):
        return remembered
    memory = _memory(path)
    try:
        make_folder(memory.parent)
        with locked(memory):  # so that the ranks of a machine hash a file once
            return remembered_sha256(path) or _hash_and_remember(path, memory, progress, done, total)
    except OSError:  # the cache cannot be written
        return _hash(path, progress, done, total)


def _hash_and_remember(path: Path, memory: Path, progress: Progress | None, done: int, total: int) -> str:
    started, before = time.time_ns(), _status(path)
    sha256 = _hash(path, progress, done, total)
    if _status(path) != before:
        raise DataError(f"{path} changed while it was being read; run the command again when it is complete")
    if before["ctime_ns"] < started - _TICK_NS:
        record = {"status": before, "sha256": sha256}
        write_json(memory, {**record, CHECKSUM: digest(record)})
    return sha256


def _hash(path: Path, progress: Progress | None, done: int, total: int) -> str:
    content = hashlib.sha256()
    try:
        with open_to_read(path) as file:
            while block := file.read(_READ_AT_ONCE):
                content.update(block)
                done += len(block)
                if progress:
                    progress("hashing files", min(done, total), total)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the source's files") from None
    return content.hexdigest()


def _status(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "path": str(path.resolve()),
        "size": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _memory(path: Path) -> Path:
    return cache_dir() / "hashes" / f"{digest(str(path.resolve()))[:32]}.json"
