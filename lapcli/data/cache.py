"""Builds each cache folder once, even if several processes need it or are killed meanwhile.

A folder is filled under a temporary name and then renamed. One process builds it; the others wait for its lock, which
ends with the process that holds it.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from lapcli.runtime.errors import LapError
from lapcli.runtime.files import NO_LOCKS, sha256_of_json


def digest(*parts: object) -> str:
    """Return a cache key: the sha256 of values that JSON can express, the same on every machine."""
    return sha256_of_json(parts)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; on a file system without locks the last process that builds the folder wins."""
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def build_once(folder: Path, build: Callable[[Path], None], is_intact: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return `folder`, filled by `build` first if it is missing or damaged (not `is_intact`)."""
    if is_intact(folder):
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not is_intact(folder):  # another process may have built it while this one waited
                for remains in (folder, unfinished):  # damaged, or left by a build that was killed
                    shutil.rmtree(remains, ignore_errors=True)
                unfinished.mkdir()
                try:
                    build(unfinished)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise LapError(
            f"cannot write {folder} ({error.strerror}); free some space, or set LAP_CACHE to another folder"
        ) from error
    return folder
