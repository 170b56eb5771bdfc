"""Renames and removes runs, and removes checkpoints that are no longer needed.

Every function holds the lock of the run while it works, so that a run that is being trained is not touched. A folder is
renamed to a hidden name before it is removed: a kill in between leaves nothing that looks like a run or a checkpoint.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lapcli.catalogue.listing import best_validation, is_of_a_sweep, size_of, started_from
from lapcli.runs import CHECKPOINTS, Run, check_name, locked, read_run, read_summary, runs_in
from lapcli.runtime.errors import DataError, LapError, UsageError
from lapcli.runtime.files import move, remove


@dataclass(frozen=True)
class Pruning:
    """The checkpoints of one run to remove, and why the others are kept."""

    run: str
    path: Path
    removed: list[int]  # steps
    kept: dict[int, str]  # step to reason
    bytes: int  # of those removed


def rename_run(run: Run, name: str) -> Path:
    """Rename a run within its folder. Its age is kept: a renamed run does not become the newest."""
    check_name(name, "choose another name")
    if names := list(dependent_runs(run.path)):
        raise UsageError(
            f"{run.name} cannot be renamed: {', '.join(names)} started from it and refer to it by its name; copy the "
            "folder to get a run of another name"
        )
    new = run.path.with_name(name)
    with locked(run.path):
        if os.path.lexists(new):
            raise UsageError(f"{new} already exists; choose another name")
        try:
            move(run.path, new)
        except OSError as error:
            raise LapError(f"{run.path} cannot be renamed ({error.strerror}); check its permissions") from None
    return new


def remove_run(path: Path) -> int:
    """Remove a run, even a damaged one, with all its files; return the number of freed bytes."""
    with locked(path):
        freed = size_of(path)
        _remove(path, path.with_name(f".{path.name}.removing"))
    return freed


def dependent_runs(path: Path) -> dict[str, str]:
    """Find runs in the same folder that started from this one: name and sha256 of their initial weights."""
    starts = {other.name: started_from(read_run(other)) for other in runs_in(path.parent) if other != path}
    return {
        name: start[1]
        for name, start in starts.items()
        if start is not None and (start[0] == path.name or Path(start[0]).resolve() == path.resolve())
    }


def refuse_running(paths: Sequence[Path]) -> None:
    """Raise if any run is being trained, before any of them is touched."""
    for path in paths:
        with locked(path):
            pass


def plan_prunings(paths: Sequence[Path], keep: int, with_sweeps: bool, are_named: bool) -> list[Pruning]:
    """Plan the pruning of each run. One that is being trained, of a sweep or damaged is left out, or an error if a user
    named it."""
    prunings: list[Pruning] = []
    for path in paths:
        try:
            refuse_running([path])
            if is_of_a_sweep(path) and not with_sweeps:
                raise UsageError(f"{path} belongs to a sweep; its runs are pruned only with --yes")
            prunings.append(plan_pruning(read_run(path), keep))
        except UsageError:
            if are_named:
                raise
    return prunings


def plan_pruning(run: Run, keep: int) -> Pruning:
    """Plan to remove all checkpoints but the newest `keep`, the best, and those that another run started from."""
    from lapcli import checkpoint

    steps = checkpoint.steps_in(run.checkpoints)
    folders = {step: run.checkpoints / f"step-{step:06d}" for step in steps}
    kept = dict.fromkeys(steps[max(0, len(steps) - keep) :], "among the newest")
    if steps:
        kept[steps[-1]] = "the newest"
        try:
            checkpoint.read(folders[steps[-1]])
        except DataError as damage:  # an older checkpoint may be all that is left of the run
            raise UsageError(f"{run.path} is not pruned: {damage}") from None
    validated = best_validation(run, among=steps)
    for step in (read_summary(run).get("best_step"), validated and validated["step"]):
        if step in folders:
            kept.setdefault(step, "the best")
    # By the weights' hash, which is right even if this run was trained again since.
    weights = {sha256: name for name, sha256 in dependent_runs(run.path).items()}
    for step in steps if weights else []:
        sha256 = _weights_sha256(folders[step])
        if sha256 in weights:
            kept.setdefault(step, f"{weights[sha256]} started from it")
    removed = [step for step in steps if step not in kept]
    freed = sum(size_of(folders[step]) for step in removed)
    return Pruning(run.name, run.path, removed, dict(sorted(kept.items())), freed)


def remove_checkpoints(pruning: Pruning) -> None:
    """Remove the checkpoints of a plan."""
    with locked(pruning.path):
        for step in pruning.removed:
            folder = pruning.path / CHECKPOINTS / f"step-{step:06d}"
            _remove(folder, folder.with_name(f".removing-{folder.name}"))  # training removes this name too


def _weights_sha256(folder: Path) -> str | None:
    """Return the sha256 in the checkpoint's state; None if it is damaged, so that no run can have started from it."""
    from lapcli.checkpoint import Checkpoint

    try:
        return Checkpoint(folder, 0, json.loads((folder / "state.json").read_bytes())).weights_sha256
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(folder: Path, doomed: Path) -> None:
    try:
        remove(doomed, or_leave=True)  # left over by a removal that was killed
        move(folder, doomed)
        remove(doomed)
    except OSError as error:
        raise LapError(f"{folder} cannot be removed ({error.strerror}); check its permissions") from None
