"""Builds a folder of the cache once, however many processes need it and whenever they are killed.

A folder is filled under a temporary name and then renamed. One process builds it, the others wait for its lock, which
ends with the process that holds it.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from lapcli.runtime.errors import LapError
from lapcli.runtime.files import NO_LOCKS, sha256_of_json

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"


def digest(*parts: object) -> str:
    """Return a cache key: the sha256 of values that JSON can express, the same on every machine."""
    return sha256_of_json(parts)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = FileLock(f"{folder}.lock", fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        # Two processes may then build the same folder; the later rename wins.
    try:
        yield
    finally:
        lock.release()


def build_once(folder: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return `folder`, after `build` has filled it if it was missing or damaged (not `is_whole`)."""
    if folder.is_dir() and is_whole(folder):
        return folder
    unfinished = folder.with_name(folder.name + UNFINISHED)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if folder.is_dir() and is_whole(folder):  # another process has built it while this one waited
                return folder
            if folder.is_dir():
                log.warning("%s is damaged; building it again", folder)
                shutil.rmtree(folder)
            shutil.rmtree(unfinished, ignore_errors=True)  # of a build that was killed
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
