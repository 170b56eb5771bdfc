"""Files: atomic writes, JSON, hashes and locks.

Whatever is written whole is written beside its place, flushed and renamed, so that a reader, or a second start after a
kill, sees either the old content or the new.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from enum import Enum
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from lapcli.runtime.environment import is_main_process
from lapcli.runtime.errors import DataError, LapError, UsageError

log = logging.getLogger(__name__)

#: Errors of a file system that has no locks: Lustre mounted without `flock`, NFS without a lock daemon.
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
_warned_about: set[int] = set()  # devices, as `stat` numbers them


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` for a library to write; it becomes `path` when the block ends."""
    name = path.name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")  # a name has at most 255 bytes
    temporary = path.with_name(f".{name}.{threading.get_native_id()}.tmp")
    try:
        with temporary.open("wb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777  # of the umask
        yield temporary
        os.chmod(temporary, mode)  # safetensors writes files of mode 0600, which a colleague could not read
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write to an open file on a full disk names none
        raise
    finally:
        temporary.unlink(missing_ok=True)


def open_to_read(path: Path | str) -> BufferedReader:
    return open(path, "rb")


def read_bytes(path: Path) -> bytes:
    return path.read_bytes()


def read_text(path: Path, errors: str = "strict") -> str:
    return path.read_text(encoding="utf-8", errors=errors)


def write_bytes(path: Path, content: bytes) -> None:
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def append(path: Path, content: bytes) -> None:
    """Append in a single write, so that a kill or a full disk leaves at most one unfinished line at the end."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        written = os.write(handle, content)
    finally:
        os.close(handle)
    if written != len(content):  # a disk that is almost full takes a part without an error
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def open_to_write(path: Path, mode: str = "wb") -> IO[Any]:
    """Open a file that is written piece by piece: a log, a lock, a file of a folder that is renamed once complete."""
    return path.open(mode, encoding=None if "b" in mode else "utf-8")


def make_folder(path: Path, *, is_new: bool = False) -> Path:
    """Make a folder and its parents; with `is_new` the folder alone, which must not exist yet."""
    path.mkdir(parents=not is_new, exist_ok=not is_new)
    return path


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


def write_for_user(path: Path, text: str) -> None:
    """Write text to the place that a user named with --out."""
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: to be written to, not replaced
            path.write_bytes(text.encode("utf-8"))
        else:
            write_text(path.resolve(), text)  # a link stays, and what it points to is written
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written ({error.strerror}); name another file") from None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, again: str) -> dict[str, Any]:
    """Read a JSON object; DataError for a damaged file, with `again`, how to recreate it.

    A file that is missing or cannot be opened raises OSError, for the caller to explain.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a backup, or {again}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged (it is not a JSON object); restore it from a backup, or {again}")
    return content


def sha256_of_json(content: Any) -> str:
    """Hash what JSON can express, independently of the order of keys: the same on every machine."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a folder's entries: after a power cut a rename may have survived without the contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Lock(Enum):
    HELD = "held"
    TAKEN = "taken"  # by another process
    UNSUPPORTED = "unsupported"  # the file system has no locks: nobody holds it, and nobody can


def lock_file(file: IO[Any], *, wait: bool = False) -> Lock:
    """Take the advisory lock of an open file, which the kernel releases when the file is closed.

    A file system without locks is warned about once and does not stop the caller.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):  # the latter on NFS, which emulates flock by a byte-range lock
        return Lock.TAKEN
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise LapError(f"{file.name} cannot be locked ({error.strerror}); try again or use another disk") from error
        device = os.fstat(file.fileno()).st_dev
        if device not in _warned_about and is_main_process():  # rank 0 warns for all ranks
            log.warning(
                "warning: the file system of %s has no locks (%s): make sure that no second process works "
                "on the same run",
                file.name,
                error.strerror,
            )
        _warned_about.add(device)
        return Lock.UNSUPPORTED
    return Lock.HELD


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of that file; None if that cannot be known."""
    try:
        with path.open("rb") as file:
            # Shared, so that two readers who look at the same moment do not take each other for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # no permission to open it, or a file system without locks
        return None
    return False
