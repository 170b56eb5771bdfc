"""The progress of a cell, read from its run directory: the state of a sweep is stored nowhere else.

`runs/.sweeps/NAME.lock` is held while a process works on the cell, `NAME.log` is the output of its commands;
`runs/NAME/sweep.json` lists the commands that followed its training, with the weights that they saw, and marks a run
of a search.
"""

import fcntl
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lapcli.runs import (
    INFO,
    METRICS,
    SUMMARY,
    SWEEP,
    TRAIN_AGAIN,
    changes,
    is_untrained,
    read_info,
    read_run,
    status_of,
)
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import NO_LOCKS, read_json, write_json
from lapcli.sweep.grid import Cell
from lapcli.training.metrics import last_step_metrics

WORK = ".sweeps"
_SHOWN = 8  # cells named in a message


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a cell's training."""

    status: str  # new, or the run's: running, interrupted, failed, finished
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    failure: str | None = None
    diverged: bool = False
    weights_sha256: str | None = None

    @property
    def is_trained(self) -> bool:
        return self.status == "finished"


def progress(cell: Cell, runs_dir: Path) -> TrainingProgress:
    """Read the progress from the cell's run; a run of that name with another recipe does not count."""
    path = runs_dir / cell.name
    info = _info(path)
    if info is None or changed_keys(cell, path, info):
        return TrainingProgress("new")
    status = status_of(path, info)
    # `run.json` has the step of the last save; while a run trains, its metrics are ahead of it.
    last = last_step_metrics(path / METRICS) if status == "running" else {}
    return TrainingProgress(
        status=status,
        step=max(int(last.get("step", 0)), int(info.get("step") or 0)),
        steps=info.get("steps"),
        loss=last.get("loss"),
        failure=info.get("failure"),
        diverged=bool(info.get("diverged")) and status == "failed",
        weights_sha256=info.get("weights_sha256"),
    )


def changed_keys(cell: Cell, path: Path, info: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, the run's value, the cell's) of each key for which `lap train` would refuse to resume the run.

    Recipes are compared key by key: a run of an earlier version has no value for keys that were added since, and gets
    their defaults. Equal hashes make that unnecessary.
    """
    if info.get("recipe_sha256") == cell.recipe_sha256:
        return []
    return changes(read_run(path), cell.loaded)


def last_validation(cell: Cell, runs_dir: Path) -> dict[str, float]:
    """Return the numbers of a finished run's last validation."""
    path = runs_dir / cell.name / SUMMARY
    end = read_json(path, TRAIN_AGAIN).get("end") if path.is_file() else {}
    numbers = end if isinstance(end, dict) else {}
    return {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}


def commands_left(cell: Cell, runs_dir: Path) -> list[str]:
    """Return the commands of `then` that have not yet run with the current weights."""
    weights = progress(cell, runs_dir).weights_sha256
    done = _read(runs_dir / cell.name / SWEEP)
    # Before the first save `weights` is None, which would equal the None of a command that has not run.
    return [text for text in cell.then if done.get(text) != weights or weights is None]


def record_command(cell: Cell, runs_dir: Path, command: str) -> None:
    path = runs_dir / cell.name / SWEEP
    # With the weights, so that a run that is trained anew is evaluated anew.
    write_json(path, {**_read(path), command: progress(cell, runs_dir).weights_sha256})


def mark_as_search(run: Path) -> None:
    """Mark a run of a search, which only chose values for others, so that reports do not count it as a result."""
    path = run / SWEEP
    if path.parent.is_dir() and not (known := _read(path)).get("search"):
        write_json(path, {**known, "search": True})


def log_of(cell: Cell, runs_dir: Path) -> Path:
    return runs_dir / WORK / f"{cell.name}.log"


def make_work_folder(runs_dir: Path) -> Path:
    folder = runs_dir / WORK
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}; choose another --runs-dir") from None
    return folder


def refuse_others(cells: Iterable[Cell], runs_dir: Path) -> None:
    """Raise UsageError if runs of the cells' names have another recipe: `lap train` would refuse each of them."""
    others = []
    for cell in cells:
        path = runs_dir / cell.name
        info = _info(path)
        differing = [] if info is None else changed_keys(cell, path, info)
        # A run without a step is no obstacle: `lap train` replaces it.
        if differing and not is_untrained(read_run(path)):
            key, old, new = differing[0]
            more = f" and {len(differing) - 1} more keys" if len(differing) > 1 else ""
            others.append(f"  {cell.name}: {key} {json.dumps(old)} in the run, {json.dumps(new)} now{more}")
    if others:
        shown = "\n".join([*others[:_SHOWN], *([f"  and {len(others) - _SHOWN} more"] if len(others) > _SHOWN else [])])
        raise UsageError(
            f"runs of {len(others)} of the cells' names in {runs_dir} were started with another recipe:\n{shown}\n"
            "Choose new names with --name, or another --runs-dir. Nothing was started."
        )


def lock_cell(cell: Cell, runs_dir: Path) -> IO[str] | None:
    """Take the cell's lock; None if another process has it. Children inherit it: it outlives a killed sweep."""
    make_work_folder(runs_dir)
    # Never removed: two processes could each hold the lock of a file of this name, the removed one and its successor.
    handle = (runs_dir / WORK / f"{cell.name}.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter on NFS, which emulates flock by a byte-range lock
        handle.close()
        return None
    except OSError as error:  # nobody can hold it where the file system has no locks
        if error.errno not in NO_LOCKS:
            raise
    return handle


def _info(path: Path) -> dict[str, Any] | None:
    """Read and verifies `run.json` of a cell's run; None if there is no run."""
    return read_info(path) if (path / INFO).is_file() else None


def _read(path: Path) -> dict[str, Any]:
    """Read `sweep.json` of a run; empty if there is none."""
    return read_json(path, "remove it and run the sweep again") if path.is_file() else {}
