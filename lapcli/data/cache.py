"""Builds a folder of the cache once, however many processes need it and whenever they are killed.

A folder is filled under a temporary name and then renamed. One process builds it, the others wait for its lock, which
ends with the process that holds it.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from lapcli.runtime.errors import LapError
from lapcli.runtime.files import sha256_of_json

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"


def digest(*parts: object) -> str:
    """Return a cache key: the sha256 of values that JSON can express, the same on every machine."""
    return sha256_of_json(parts)


def build_once(folder: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return `folder`, after `build` has filled it if it was missing or damaged (not `is_whole`)."""
    if folder.is_dir() and is_whole(folder):
        return folder
    unfinished = folder.with_name(folder.name + UNFINISHED)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
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
