"""Atomic writes, and locks on file systems without them."""

import errno
import fcntl
import json
import os

import pytest
from support import run_main
from sweep_support import write_recipe

from lapcli.experiments.cells import lock_cell
from lapcli.runtime import files


def test_writing_a_file_is_all_or_nothing(tmp_path):
    files.write_text(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(tmp_path / "a.json", "\ud800")
    assert (tmp_path / "a.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture(params=[errno.ENOLCK], ids=["NFS"])
def no_locks(request, monkeypatch):
    """`flock` as on a file system without locks."""

    def flock(file, operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_a_run_trains_with_one_warning(no_locks, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "cache"))
    recipe, runs = write_recipe(tmp_path, train={"steps": 2}), tmp_path / "runs"
    for _ in range(2):  # the second finds its run finished and its text prepared
        code, _, _ = run_main(capsys, "train", str(recipe), "--runs-dir", str(runs))
        assert code == 0
    assert json.loads((runs / "tiny" / "run.json").read_text())["status"] == "finished"
    assert any("has no locks" in record.getMessage() for record in caplog.records)
    assert not list((tmp_path / "cache").rglob("*.unfinished"))
    assert lock_cell("cell", runs) is not None
