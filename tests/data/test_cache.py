import errno
import logging
import os
import threading
import time

import pytest

from lapcli.data.cache import build_once, digest
from lapcli.runtime.errors import DataError, LapError


def fill(folder):
    (folder / "content").write_text("whole")


def is_whole(folder):
    return (folder / "content").is_file() and (folder / "content").read_text() == "whole"


def test_built_once_and_then_found(tmp_path):
    built = []
    for _ in range(3):
        folder = build_once(tmp_path / "a" / "key", lambda path: (built.append(1), fill(path)), is_whole)
        assert is_whole(folder)
    assert len(built) == 1


def test_a_damaged_folder_is_built_again_with_a_warning(tmp_path, caplog):
    build_once(tmp_path / "key", fill, is_whole)
    (tmp_path / "key" / "content").write_text("who")
    (tmp_path / "key" / "rest").touch()
    with caplog.at_level(logging.WARNING):
        build_once(tmp_path / "key", fill, is_whole)
    assert f"{tmp_path / 'key'} is damaged" in caplog.text
    assert [path.name for path in (tmp_path / "key").iterdir()] == ["content"]


def test_a_failed_build_leaves_nothing_and_keeps_its_error(tmp_path):
    def fail(folder):
        fill(folder)
        raise DataError("the reason")

    with pytest.raises(DataError, match="the reason"):
        build_once(tmp_path / "key", fail, is_whole)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert is_whole(build_once(tmp_path / "key", fill, is_whole))


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    def fail(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(LapError, match=r"key .*LAP_CACHE"):
        build_once(tmp_path / "key", fail, is_whole)


def test_one_builds_and_the_others_wait(tmp_path):
    built = []

    def slow(folder):
        built.append(1)
        time.sleep(0.2)
        fill(folder)

    # flock belongs to the open file, so threads exclude each other as processes do.
    threads = [threading.Thread(target=build_once, args=(tmp_path / "key", slow, is_whole)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_keys_depend_on_every_part():
    assert digest(1, ["a", 2]) == digest(1, ("a", 2))
    assert len({digest(1, ["a"]), digest(1, "a"), digest(["a"], 1), digest(1), digest("1")}) == 5
