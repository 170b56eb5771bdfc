"""Builds a folder of the cache once, however many processes need it and whenever they are killed.

A folder that exists under its final name is finished: it was written under a temporary name, flushed and renamed. One
process builds (an advisory lock that the kernel releases when its holder dies), the others wait and then read. On a
file system without locks each process builds under its own temporary name, and the first to finish renames its folder.
"""

import errno
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lapcli.runtime.errors import LapError
from lapcli.runtime.files import (
    Lock,
    flush_to_disk,
    lock_file,
    make_folder,
    move,
    open_to_write,
    remove,
    sha256_of_json,
)

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"


def digest(*parts: object) -> str:
    """Return a cache key: the sha256 of values that JSON can express, the same on every machine."""
    return sha256_of_json(parts)


def build_once(folder: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """Return `folder`, after `build` has filled it if it was missing or damaged (not `is_whole`)."""
    if folder.is_dir() and is_whole(folder):
        return folder
    try:
        make_folder(folder.parent)
        with locked(folder) as is_alone:
            if folder.is_dir() and is_whole(folder):  # another process may have built it while this one waited
                return folder
            if folder.is_dir():
                log.warning("%s is damaged (a file is missing, cut short or changed); building it again", folder)
                remove(folder)
            if is_alone:
                _remove_abandoned(folder.parent)
            # A lock holder may reuse the name that a killed build left; without locks a living build may be using it.
            suffix = "" if is_alone else f"-{uuid.uuid4()}"
            unfinished = folder.with_name(folder.name + suffix + UNFINISHED)
            remove(unfinished, or_leave=True)
            make_folder(unfinished, is_new=True)
            try:
                build(unfinished)
                # Contents before the rename: after a power cut a folder under its final name counts as complete.
                for path in sorted(unfinished.iterdir()):
                    flush_to_disk(path)
                flush_to_disk(unfinished)
                _give_name(unfinished, folder, is_whole)
            except BaseException:
                remove(unfinished, or_leave=True)
                raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise LapError(
                f"the disk is full while writing {folder}; free some space, or set LAP_CACHE to another disk"
            ) from error
        raise LapError(
            f"cannot write {folder} ({error.strerror}); set LAP_CACHE to a folder that you can write to"
        ) from error
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Provide a context in which no other process builds the folder; yield False on a file system without locks."""
    # The lock file stays: removing it would let a third process lock a new file of the same name beside a waiting one.
    with open_to_write(_lock_path(folder)) as file:
        lock = lock_file(file)
        if lock is Lock.TAKEN:
            log.info("another process is building %s; waiting for it", folder)
            lock = lock_file(file, wait=True)
        yield lock is Lock.HELD


def _give_name(unfinished: Path, folder: Path, is_whole: Callable[[Path], bool]) -> None:
    try:
        move(unfinished, folder)
    except OSError:  # without locks another process may have finished first
        if not (folder.is_dir() and is_whole(folder)):
            raise
        remove(unfinished)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed builds left, of other keys too: no process holds their locks."""
    for leftover in parent.glob("*" + UNFINISHED):
        with open_to_write(_lock_path(leftover.with_name(leftover.name.removesuffix(UNFINISHED)))) as file:
            if lock_file(file) is Lock.HELD:
                remove(leftover, or_leave=True)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")
