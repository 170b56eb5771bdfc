"""Writing so that a reader, or a second start after a kill, sees the old content or the new one and nothing between;
and locks that end with the process that holds them."""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import IO, Any

from lapcli.runtime.errors import DataError, LapError, UsageError

log = logging.getLogger(__name__)

#: The answers of a file system that has no locks: Lustre mounted without `flock`, NFS without a lock daemon.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
_warned_about: set[int] = set()  # devices, as `stat` numbers them


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_for_user(path: Path, text: str) -> None:
    """To a place that a user named with --out."""
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it")
    try:
        write_text(path, text)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written ({error.strerror}); name another file") from None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


#: Of JSON files with a checksum. Version 0.1 wrote neither a format nor a checksum; a file that has one of them needs
#: the other, so that no damage in one place makes a file look like one of version 0.1.
FORMAT = 2


def write_checked_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object whose last key is the sha256 of the rest."""
    content = {"format": FORMAT, **json.loads(json.dumps(value))}
    write_json(path, {**content, "sha256": sha256_of_json(content)})


def read_checked_json(path: Path, again: str) -> dict[str, Any]:
    """The object that `write_checked_json` wrote; a damaged file is named with `again`, how to get it once more.

    A file that is not there or cannot be opened is the caller's to explain: OSError.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); put it back from a copy, or {again}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged (it is not a JSON object); put it back from a copy, or {again}")
    sha256 = content.pop("sha256", None)
    if (sha256 is not None or "format" in content) and sha256 != sha256_of_json(content):
        raise DataError(f"{path} is not what was written (its sha256 differs); put it back from a copy, or {again}")
    if content.pop("format", FORMAT) != FORMAT:
        raise DataError(f"{path} was written by a newer version of lap; install that version to read it")
    return content


def sha256_of_json(content: Mapping[str, Any]) -> str:
    """The same for equal objects, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flush_to_disk(path: Path) -> None:
    """Not only to the kernel: a rename may survive a power cut that the contents do not. A folder's are its entries."""
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
    """Takes the advisory lock of an open file, which the kernel releases when the file is closed.

    Where the file system has no locks, that is said once and is no reason to stop.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):  # the latter on NFS, where flock is a lock of a byte range
        return Lock.TAKEN
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise LapError(f"{file.name} cannot be locked ({error.strerror}); try again or use another disk") from error
        device = os.fstat(file.fileno()).st_dev
        if device not in _warned_about and os.environ.get("RANK", "0") == "0":  # one of the ranks says it for all
            log.warning(
                "warning: the file system of %s has no locks (%s): see to it yourself that no second process works "
                "on the same run",
                file.name,
                error.strerror,
            )
        _warned_about.add(device)
        return Lock.UNSUPPORTED
    return Lock.HELD


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of that file; None where that cannot be known."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # no permission to open it, or a file system without locks
        return None
    return False
