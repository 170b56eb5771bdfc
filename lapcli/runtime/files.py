"""Every write of the package is atomic: a reader, or a second start after a kill, sees either the old content or the
new. Locks end with the process that holds them.

A file is written under a temporary name `.NAME.THREAD.PID`, which stays locked while it is being written, unless a
library replaces it by a file of its own. A process that is killed leaves it behind unlocked, and `remove_leftovers`
removes it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from enum import Enum
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from lapcli.runtime.environment import is_main_process
from lapcli.runtime.errors import DataError, LapError, UsageError

log = logging.getLogger(__name__)

#: Errors of a file system that has no locks: Lustre mounted without `flock`, NFS without a lock daemon.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
_warned_about: set[int] = set()  # devices, as `stat` numbers them
NOT_A_FILE = "it is a pipe or a device, not a file"
_TEMPORARY = re.compile(r"\..+\.(\d{1,10})", re.DOTALL)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path` that a library may write by name; it becomes `path` when the block ends.

    Its permissions follow the umask, whatever the library sets: safetensors writes files of mode 0600, which a
    colleague could not read.
    """
    temporary, handle = _temporary(path)
    try:
        with _named(path):
            # Of the file that we made with the umask, before a library replaces it by one of its own.
            mode = os.fstat(handle.fileno()).st_mode
            yield temporary
            os.chmod(temporary, mode & 0o777)
            flush_to_disk(temporary)
            os.replace(temporary, path)
    finally:
        handle.close()
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that names none, such as that of a write to an open file on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _temporary(path: Path) -> tuple[Path, IO[bytes]]:
    """Open an empty file for the next content of `path`, locked, so that no other process takes it for a leftover."""
    name = path.name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")  # a name has at most 255 bytes
    # A file for each thread: the watch of a step writes run.json beside the training, and opening empties the file.
    temporary = path.with_name(f".{name}.{threading.get_native_id()}.{os.getpid()}")
    while True:
        handle = temporary.open("wb")
        lock_file(handle)
        if is_same_file(handle, temporary):  # another process may have removed it as a leftover before the lock
            return temporary, handle
        handle.close()


def open_to_read(path: Path | str) -> BufferedReader:
    """Open a file for reading; OSError for a pipe, which would block, and a device, which may never end."""

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK)  # opens a pipe without a writer; no effect on regular files
        # A folder passes: `open` itself then raises the usual IsADirectoryError.
        if not stat.S_ISREG(kind := os.fstat(handle).st_mode) and not stat.S_ISDIR(kind):
            os.close(handle)
            raise OSError(errno.EINVAL, NOT_A_FILE, name)
        return handle

    return open(path, "rb", opener=opener)


def read_bytes(path: Path) -> bytes:
    with open_to_read(path) as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    return read_bytes(path).decode("utf-8", errors)


def write_bytes(path: Path, content: bytes) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def append(path: Path, content: bytes) -> None:
    """Append in a single write, so that a kill or a full disk leaves at most one unfinished line at the end."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        with _named(path):
            written = os.write(handle, content)
    finally:
        os.close(handle)
    if written != len(content):  # a disk that is almost full takes a part without an error
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def open_to_write(path: Path, mode: str = "wb") -> IO[Any]:
    """Open a file that is written piece by piece: a log, a lock, a file of a folder that is renamed once complete."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, NOT_A_FILE, str(path))
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
        # Of a link to a folder only the link is removed.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=or_leave)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        if not or_leave:
            raise


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in a folder that no living process writes; skip a folder without permission."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if (match := _TEMPORARY.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                    lock = lock_file(file)
                    # Without locks only the process id in the name is left, which says nothing about other machines.
                    if lock is Lock.HELD or (lock is Lock.UNSUPPORTED and not is_alive(match[1])):
                        os.unlink(entry.path)


def is_alive(pid: Any) -> bool:
    """Return whether this machine has a process with that id."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def is_same_file(handle: IO[Any], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except OSError:
        return False


def write_for_user(path: Path, text: str) -> None:
    """Write text to the place that a user named with --out."""
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: to be written to, not replaced
            with path.open("wb") as stream:
                stream.write(text.encode("utf-8"))
        else:
            write_text(path.resolve(), text)  # a link stays, and what it points to is written
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written ({error.strerror}); name another file") from None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


#: Format of JSON files with a checksum. Version 0.1 wrote neither a format nor a checksum; a file that has one of them
#: needs the other, so that no damage in one place makes a file look like one of version 0.1.
FORMAT = 2


def write_checked_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object whose last key is the sha256 of the rest."""
    # As a reader will get it: tuples become lists, and numbers as keys become strings, which sort differently.
    content = {"format": FORMAT, **json.loads(json.dumps(value))}
    write_json(path, {**content, "sha256": sha256_of_json(content)})


def read_checked_json(path: Path, again: str) -> dict[str, Any]:
    """Read the object that `write_checked_json` wrote; DataError for a damaged file, with `again`, how to recreate it.

    A file that is missing or cannot be opened raises OSError, for the caller to explain.
    """
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a backup, or {again}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged (it is not a JSON object); restore it from a backup, or {again}")
    sha256 = content.pop("sha256", None)
    if (sha256 is not None or "format" in content) and sha256 != sha256_of_json(content):
        raise DataError(f"{path} is not what was written (its sha256 differs); restore it from a backup, or {again}")
    if content.pop("format", FORMAT) != FORMAT:
        raise DataError(f"{path} was written by a newer version of lap; install that version to read it")
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
    with open_to_read(path) as file:
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
        if error.errno not in _NO_LOCKS:
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
        with open_to_read(path) as file:
            # Shared, so that two readers who look at the same moment do not take each other for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # no permission to open it, or a file system without locks
        return None
    return False
