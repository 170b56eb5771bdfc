"""Run directories: `runs/<name>/` with the resolved recipe, `run.json`, metrics, checkpoints and what is made of them.

A run is never overwritten: the same command goes on with an unfinished one, reports a finished one, and refuses one
whose recipe differs, with the keys; `fresh` moves the old one aside.
"""

import json
import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lapcli.recipe import differing_keys, load_recipe, recipe_hash, recipe_to_dict, recipe_to_yaml
from lapcli.recipe.schema import BaseRecipe
from lapcli.runtime import __version__
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import Lock, lock_file, write_json, write_text

LOCK = ".lock"
RECIPE, INFO, METRICS, CHECKPOINTS, SUMMARY = "recipe.yaml", "run.json", "metrics.jsonl", "checkpoints", "summary.json"
SWEEP = "sweep.json"  # what a sweep did with the run
#: Keys of a recipe that a run may go on with another value of.
CHANGE_NOTHING = ("data.workers",)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


@dataclass
class Run:
    path: Path
    recipe: BaseRecipe
    info: dict[str, Any]
    _lock: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_finished(self) -> bool:
        return self.info.get("status") == "finished"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def update(self, **changes: Any) -> None:
        """Changes `run.json`, whole or not at all."""
        self.info.update(changes, updated=_now())
        write_json(self.path / INFO, self.info)

    def lock(self) -> None:
        """One process trains a run; the lock ends with it, however it ends."""
        handle = (self.path / LOCK).open("w")
        if lock_file(handle) is Lock.TAKEN:
            handle.close()
            raise UsageError(f"{self.path} is being trained by another process; wait for it or use --name")
        self._lock = handle
        _locks.add(handle)

    def unlock(self) -> None:
        if self._lock is not None:
            _locks.discard(self._lock)
            self._lock.close()
            self._lock = None


_locks: set[Any] = set()


def _leave_locks_to_the_parent() -> None:
    """A worker that outlives a killed run for a moment must not keep the next one from starting."""
    for handle in _locks:
        handle.close()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:60]!r} cannot name a run: it takes ASCII letters, digits and, after the first, . _ + -; use --name"
        )


def open_run(runs_dir: Path, name: str, recipe: BaseRecipe, fresh: bool = False) -> Run:
    """The run of that name: made if there is none, gone on with if its recipe is this one."""
    check_name(name)
    path = runs_dir / name
    if fresh and path.exists():
        _move_aside(path)
    if not path.exists():
        return _create(path, recipe)
    run = read_run(path)
    differing = changes(run, recipe)
    if differing and has_nothing(run):  # it failed or was stopped before its first step: a typo in --data, say
        run.lock()
        shutil.rmtree(path)
        run.unlock()
        return _create(path, recipe)
    if differing:
        lines = "\n".join(f"  {key}: {_short(old)} in the run, {_short(new)} now" for key, old, new in differing)
        raise UsageError(
            f"{path} was started with another recipe:\n{lines}\n"
            "Use --name for a new run beside it, or --fresh to move the old one aside."
        )
    return run


def changes(run: Run, recipe: BaseRecipe) -> list[tuple[str, Any, Any]]:
    """(key, the run's value, the recipe's) for which the run cannot go on with that recipe."""
    differing = differing_keys(recipe_to_dict(run.recipe), recipe_to_dict(recipe))
    return [row for row in differing if row[0] not in CHANGE_NOTHING]


def has_nothing(run: Run) -> bool:
    """Neither a step, nor a checkpoint, nor anything that somebody else has put there."""
    made = {RECIPE, INFO, METRICS, CHECKPOINTS, LOCK, "tokenizer.json"}
    steps = run.metrics.read_text(encoding="utf-8", errors="replace") if run.metrics.is_file() else ""
    is_ours = all(path.name in made for path in run.path.iterdir())
    return is_ours and '"loss"' not in steps and not any(run.checkpoints.glob("*"))


def read_run(path: Path) -> Run:
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
        if not isinstance(info, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        if not (path / INFO).exists():
            raise UsageError(f"{path} is not a run directory: it has no {INFO}; name another") from None
        raise UsageError(f"{path} is not a run directory ({INFO}: {error}); name another") from None
    recipe = load_recipe(path / RECIPE, is_kept=True)
    if not isinstance(recipe, BaseRecipe):
        raise UsageError(f"{path / RECIPE} is no recipe of a run; name another")
    return Run(path, recipe, info)


def write_summary(run: Run, summary: dict[str, Any]) -> None:
    write_json(run.path / SUMMARY, summary)


def read_summary(run: Run) -> dict[str, Any]:
    """First and last validation, samples: what a finished run has to show."""
    try:
        summary = json.loads((run.path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def named_run(runs_dir: Path, name: str) -> Run:
    """By its name in `runs_dir`, or by its folder."""
    path = Path(name) if (Path(name) / INFO).is_file() else runs_dir / name
    if not path.is_dir():
        raise UsageError(f"there is no run {name} in {runs_dir}; see --run and --runs-dir")
    return read_run(path)


def find_run(runs_dir: Path, name: str | None, objectives: set[str]) -> Run:
    """The finished run of that name (or path), of a kind that the caller accepts; the newest if none is named."""
    if name is None:
        return newest_run(runs_dir, objectives)
    run = named_run(runs_dir, name)
    kinds = " or ".join(sorted(objectives))
    if run.info.get("objective") not in objectives:
        raise UsageError(f"{run.path} is a run of {run.info.get('objective')}, and {kinds} is needed; use --run")
    if not run.is_finished:
        raise UsageError(f"{run.path} is {run.info.get('status')}, not finished; finish it first, or use --run")
    return run


def newest_run(runs_dir: Path, objectives: set[str]) -> Run:
    """The newest finished run of a kind that the caller accepts."""
    found: list[tuple[float, Path]] = []
    for path in runs_dir.glob(f"*/{INFO}"):
        try:
            info = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if info.get("status") == "finished" and info.get("objective") in objectives:
            found.append((path.stat().st_mtime, path.parent))
    if not found:
        raise UsageError(f"no finished run of {' or '.join(sorted(objectives))} in {runs_dir}; train one or use --run")
    return read_run(max(found)[1])


def versions() -> dict[str, str]:
    packages = ("torch", "numpy", "tokenizers", "safetensors", "timm", "pillow")
    return {"lap": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}


def _create(path: Path, recipe: BaseRecipe) -> Run:
    info = {
        "name": path.name,
        "objective": recipe.objective,
        "status": "running",
        "step": 0,
        "seed": recipe.seed,
        "recipe_sha256": recipe_hash(recipe),
        "created": _now(),
        "versions": versions(),
    }
    # A kill between the two files must not leave half a run: they appear together.
    temporary = path.with_name(f".new-{path.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}; choose another --runs-dir") from None
    try:
        write_text(temporary / RECIPE, recipe_to_yaml(recipe))
        write_json(temporary / INFO, info)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Run(path, recipe, info)


def _move_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(aside)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
