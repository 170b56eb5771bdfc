import errno
import os
import threading
import time

import pytest

from lapcli.data.cache import build_once
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
