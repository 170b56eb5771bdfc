"""The n-th write of a command fails, for every n: one sentence, an exit code, nothing lost, nothing left behind.

An audit hook of Python sees every file that is opened to be written, every new folder and every rename, whoever asks
for it, so it can refuse one of them.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import run_main, train_here
from sweep_support import write_recipe

from lapcli.recipe import load_recipe
from lapcli.training.metrics import without_times

pytestmark = pytest.mark.long  # every write of a command fails in turn

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Writes:
    """Those below a folder: how many there were, and which one is to fail."""

    def __init__(self, folder: Path, fails: int = 0, error: int = errno.ENOSPC) -> None:
        self.folder, self.fails, self.error = str(folder), fails, error
        self.count = 0

    def see(self, event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[2], int) and not arguments[2] & WRITES:
            return
        if event not in {"open", "os.mkdir", "os.rename", "os.truncate"} or not isinstance(arguments[0], str | Path):
            return
        if not str(arguments[0]).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.fails:
            raise OSError(self.error, os.strerror(self.error), str(arguments[0]))


_seen: Writes | None = None


def _hook(event: str, arguments: tuple) -> None:
    if _seen is not None:
        _seen.see(event, arguments)


@contextmanager
def watched(writes: Writes) -> Iterator[Writes]:
    global _seen
    if not _hooked:
        sys.addaudithook(_hook)  # cannot be removed, and does nothing outside this block
        _hooked.append(True)
    _seen = writes
    try:
        yield writes
    finally:
        _seen = None


_hooked: list[bool] = []


def litter(folder: Path) -> list[Path]:
    """What only a process at work may have: hidden files but for locks, and folders of the cache that are not whole."""
    return [
        path
        for path in folder.rglob("*")
        if (path.name.startswith(".") and path.name not in {".lock", ".sweeps"}) or path.name.endswith(".unfinished")
    ]


def fail_in_turn(capsys, work: Path, command: list[str], reset, result) -> None:
    """Runs the command with each of its writes failing in turn; `result()` of the next start is that of a good one."""
    reset()
    with watched(Writes(work)) as writes:
        code, _, err = run_main(capsys, *command)
    assert code == 0, err
    good, total = result(), writes.count
    assert total > 0
    for number in range(1, total + 1):
        reset()
        # No room, or none any more for this process; a disk that fails is met like the former.
        with watched(Writes(work, number, (errno.ENOSPC, errno.EACCES)[number % 2])):
            code, _, err = run_main(capsys, *command)
        said = [line for line in err.splitlines() if line.startswith("lap: ")]
        assert "Traceback" not in err, f"write {number} of {total}: {err}"
        assert (code == 0 and not said) or (code in (1, 2) and len(said) == 1), f"write {number} of {total}: {err}"
        assert litter(work) == [], f"write {number} of {total}"
        if code != 0:
            code, _, err = run_main(capsys, *command)
            assert code == 0, f"after write {number} of {total}: {err}"
        assert result() == good, f"after write {number} of {total}"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A recipe, and a run of it with the cache that it made."""
    from unittest.mock import patch

    folder = tmp_path_factory.mktemp("faults")
    write_recipe(
        folder,
        train={"steps": 2, "batch": 4},
        checkpoint={"every": 1, "keep": 1},
        validation={"every": None, "prompts": []},
    )
    with patch.dict(os.environ, LAP_CACHE=str(folder / "cache")):
        train_here(load_recipe(folder / "tiny.yaml"), folder / "runs", "tiny")
    return folder


class Place:
    """Where a command works: a copy of the run and its cache, or nothing."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        self.runs, self.recipe = folder / "runs", home / "tiny.yaml"
        folder.mkdir()

    def empty(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def trained(self, name: str = "tiny") -> object:
        """What a training has to show for itself, without its times."""
        run = self.runs / name
        info = json.loads((run / "run.json").read_text())
        lines = [without_times(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return info["status"], info["step"], info["weights_sha256"], lines, os.listdir(run / "checkpoints")


@pytest.fixture
def place(tmp_path, home, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "work" / "cache"))
    return Place(tmp_path / "work", home)


def test_training(place, capsys):
    command = ["train", str(place.recipe), "--runs-dir", str(place.runs)]
    fail_in_turn(capsys, place.folder, command, place.empty, place.trained)
