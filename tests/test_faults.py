"""The n-th write of a command fails, for every n: one sentence, an exit code, nothing lost and no files left behind.

A Python audit hook sees every file opened for writing, every new folder and every rename, from any library, so it
can refuse one of them.
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
from support import run_main
from sweep_support import write_recipe

from lapcli.training.metrics import without_times

pytestmark = pytest.mark.long  # every write of a command fails in turn

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Writes:
    """Writes below a folder: their count, and the index that fails."""

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
    """Files that only a running process may have: hidden files except locks, and incomplete cache folders."""
    return [
        path
        for path in folder.rglob("*")
        if (path.name.startswith(".") and path.name not in {".lock", ".sweeps"}) or path.name.endswith(".unfinished")
    ]


def fail_in_turn(capsys, work: Path, command: list[str], reset, result) -> None:
    """Run the command with each of its writes failing in turn; the next start gives the `result()` of a normal run."""
    reset()
    with watched(Writes(work)) as writes:
        code, _, err = run_main(capsys, *command)
    assert code == 0, err
    good, total = result(), writes.count
    assert total > 0
    for number in range(1, total + 1):
        reset()
        # Disk full, or quota exceeded; an I/O error is handled like the former.
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
    """The folder of a recipe."""
    folder = tmp_path_factory.mktemp("faults")
    settings = {"checkpoint": {"every": 1, "keep": 1}, "validation": {"every": None, "prompts": []}}
    write_recipe(folder, train={"steps": 2, "batch": 4}, **settings)
    return folder


def test_every_write_of_a_training_run_can_fail(home, tmp_path, capsys, monkeypatch):
    work = tmp_path / "work"
    monkeypatch.setenv("LAP_CACHE", str(work / "cache"))
    run = work / "runs" / "tiny"

    def empty() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()

    def trained() -> object:
        """The results of a training run, without timings."""
        info = json.loads((run / "run.json").read_text())
        lines = [without_times(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return info["status"], info["step"], info["weights_sha256"], lines, os.listdir(run / "checkpoints")

    command = ["train", str(home / "tiny.yaml"), "--runs-dir", str(run.parent)]
    fail_in_turn(capsys, work, command, empty, trained)
