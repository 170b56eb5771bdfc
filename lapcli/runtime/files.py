"""Files: atomic writes, JSON and hashes.

Complete files are written under a temporary name, flushed and renamed, so that a reader, or a second start after a
kill, sees either the old content or the new.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from lapcli.runtime.errors import DataError, UsageError

#: Errors of file systems without locks: Lustre mounted without `flock`, NFS without a lock daemon.
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    temporary = path.with_name(f".{path.name[:50]}.{threading.get_native_id()}.tmp")  # a name has at most 255 bytes
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write to an open file on a full disk names none
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, again: str) -> dict[str, Any]:
    """Read a JSON object; DataError for a damaged file, with `again`, how to recreate it.

    A file that is missing or cannot be opened raises OSError, for the caller to explain.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a backup, or {again}") from None
    return content


def append(path: Path, content: bytes) -> None:
    """Append in a single write, so that a kill or a full disk leaves at most one incomplete last line."""
    with path.open("ab", buffering=0) as file:
        if file.write(content) != len(content):  # a disk that is almost full takes a part without an error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def move(path: Path, new: Path) -> None:
    """Rename a file or a folder, durably: the rename is flushed to disk."""
    os.rename(path, new)
    flush_to_disk(new.parent)


def remove(path: Path, *, or_leave: bool = False) -> None:
    """Remove a file or a folder with its contents. `or_leave`: skip what cannot be removed, without an error."""
    try:
        if path.is_dir() and not path.is_symlink():  # a symlink to a folder is unlinked, not followed
            shutil.rmtree(path, ignore_errors=or_leave)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        if not or_leave:
            raise


def check_room(folder: Path, needed: float, what: str, remedy: str) -> None:
    """Refuse work whose output will not fit on the disk of a folder, which may not exist yet."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UsageError(
            f"{what} take up to {needed / 1e9:.3g} GB, and {place} has {free / 1e9:.3g} GB free; make room, {remedy}, "
            "or choose another --runs-dir"
        )


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a folder's entries: after a power cut the rename may survive without the contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(content: Any) -> str:
    """Hash what JSON can express, independently of the order of keys: the same on every machine."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
