"""What a source file is known by in the keys of the cache: its content.

Hashing 100 GB takes minutes, so that a hash is remembered for as long as the file has the same size, inode,
modification time and change time. A copy or an archive can restore a modification time, nothing a change time.
"""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lapcli.data.cache import digest, locked
from lapcli.data.checksums import CHECKSUM
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import write_json
from lapcli.runtime.progress import Progress

#: A file that changed less than this before it was hashed may change again within the same tick of its change time.
_TICK_NS = 1_000_000_000
_READ_AT_ONCE = 1 << 22
_HASHED_ENDS = 1 << 16
_SHA256 = re.compile(r"[0-9a-f]{64}")


def content_sha256(paths: Sequence[Path], progress: Progress | None = None) -> list[str]:
    """The sha256 of each file, read only where it is not remembered."""
    total, done, found = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
        found.append(_content_sha256(path, progress, done, total))
        done += path.stat().st_size
    return found


def remembered_sha256(path: Path) -> str | None:
    """The sha256 of a file, if it is known without reading the file."""
    try:
        kept = json.loads(_memory(path).read_text(encoding="utf-8"))
        if kept.pop(CHECKSUM, None) != digest(kept):
            return None
        return str(kept["sha256"]) if kept["status"] == _status(path) else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def hub_fingerprint(path: Path) -> list[str | int] | None:
    """The hub's own content hash: its cache names blobs by it and links to them. None where it holds copies."""
    return [path.resolve().name, path.stat().st_size] if path.is_symlink() else None


def refuse_damaged_blobs(paths: Sequence[Path], progress: Progress | None = None) -> None:
    """DataError for a file of the hub whose content is not that of its name, where the name is its sha256.

    Asked before the files are read; small text files have a name of another kind.
    """
    blobs = [path for path in paths if path.is_symlink() and _SHA256.fullmatch(path.resolve().name)]
    for path, found in zip(blobs, content_sha256(blobs, progress), strict=True):
        if found != path.resolve().name:
            raise DataError(
                f"{path.name} is damaged: {path.resolve()} does not have the sha256 of its name; remove that file, "
                "then run `lap fetch RECIPE`"
            )


def fingerprint_of_0_1(path: Path) -> list[str | int]:
    """Size, modification time and both ends, by which version 0.1 knew local files; its caches are found by it."""
    status = path.stat()
    content = hashlib.sha256()
    with path.open("rb") as file:
        content.update(file.read(_HASHED_ENDS))
        file.seek(max(status.st_size - _HASHED_ENDS, 0))
        content.update(file.read(_HASHED_ENDS))
    return [status.st_size, status.st_mtime_ns, content.hexdigest()]


def _content_sha256(path: Path, progress: Progress | None, done: int, total: int) -> str:
    if kept := remembered_sha256(path):
        return kept
    memory = _memory(path)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with locked(memory):  # the ranks of a machine hash a file once
            return remembered_sha256(path) or _hash_and_remember(path, memory, progress, done, total)
    except OSError:  # of the cache, in which nothing can be remembered then
        return _hash(path, progress, done, total)


def _hash_and_remember(path: Path, memory: Path, progress: Progress | None, done: int, total: int) -> str:
    started, before = time.time_ns(), _status(path)
    found = _hash(path, progress, done, total)
    if _status(path) != before:
        raise DataError(f"{path} changed while it was being read; run it again when it is complete")
    if before["ctime_ns"] < started - _TICK_NS:
        kept = {"status": before, "sha256": found}
        write_json(memory, {**kept, CHECKSUM: digest(kept)})
    return found


def _hash(path: Path, progress: Progress | None, done: int, total: int) -> str:
    content = hashlib.sha256()
    try:
        with path.open("rb") as file:
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
