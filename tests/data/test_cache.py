import errno
import os
import threading
import time

import pytest

from lapcli.data.cache import build_once, digest
from lapcli.runtime.errors import DataError, LapError


def fill(folder):
    (folder / "content").write_text("whole")


def is_intact(folder):
    return (folder / "content").is_file() and (folder / "content").read_text() == "whole"


def test_one_builds_and_the_others_wait(tmp_path):
    built = []

    def slow(folder):
        built.append(1)
        time.sleep(0.2)
        fill(folder)

    # flock belongs to the open file, so threads exclude each other as processes do.
    place = tmp_path / "a" / "key"
    threads = [threading.Thread(target=build_once, args=(place, slow, is_intact)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert is_intact(build_once(place, slow, is_intact))
    assert len(built) == 1


def test_a_damaged_folder_is_built_again(tmp_path):
    build_once(tmp_path / "key", fill, is_intact)
    (tmp_path / "key" / "content").write_text("who")
    (tmp_path / "key" / "rest").touch()
    build_once(tmp_path / "key", fill, is_intact)
    assert [path.name for path in (tmp_path / "key").iterdir()] == ["content"]


@pytest.mark.parametrize(
    ("error", "raised", "named"),
    [
        (DataError("the reason"), DataError, "the reason"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), LapError, "key .*LAP_CACHE"),
    ],
)
def test_a_failed_build_leaves_nothing_and_keeps_its_error(tmp_path, error, raised, named):
    def fail(folder):
        fill(folder)
        raise error

    with pytest.raises(raised, match=named):
        build_once(tmp_path / "key", fail, is_intact)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert is_intact(build_once(tmp_path / "key", fill, is_intact))


def test_keys_depend_on_every_part():
    assert digest(1, ["a", 2]) == digest(1, ("a", 2))
    assert len({digest(1, ["a"]), digest(1, "a"), digest(["a"], 1), digest(1), digest("1")}) == 5
