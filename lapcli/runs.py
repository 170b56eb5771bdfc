"""Run directories: `runs/<name>/` and the rules by which a run is created, resumed, replaced and found.

A run is never overwritten. The same command resumes an unfinished run, reports a finished one, and refuses one whose
recipe differs in a key that changes the result; `--fresh` renames the old run to `NAME.old-1` first. `run.json`
contains the resolved recipe and is read by every command; `recipe.yaml` is a copy for people; edits have no effect.
"""

import fcntl
import json
import logging
import os
import platform
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from lapcli.recipe import RecipeError, differing_keys, load_recipe, recipe_from_dict, recipe_hash, recipe_to_dict
from lapcli.recipe import recipe_to_yaml as to_yaml
from lapcli.recipe.schema import RUN, TIMM, BaseRecipe
from lapcli.runtime import __version__
from lapcli.runtime.errors import DataError, LapError, UsageError, known_names
from lapcli.runtime.files import NO_LOCKS, read_json, write_json, write_text
from lapcli.runtime.progress import say_start

log = logging.getLogger(__name__)

LOCK, TOKENIZER = ".lock", "tokenizer.json"
RECIPE, INFO, METRICS, CHECKPOINTS, SUMMARY = "recipe.yaml", "run.json", "metrics.jsonl", "checkpoints", "summary.json"
SWEEP = "sweep.json"  # commands that a sweep has run on the weights, and whether the run was only a search
MIRRORS = ("track", "tensorboard")  # copies for trackers, which can be recreated at any time
SOURCES_OF_WEIGHTS = (
    "weights come from run:NAME[@step|best], the folder of a run, or timm:NAME; `lap import` makes a run of a "
    "checkpoint of nanochat"
)
TRAIN_AGAIN = "train the run again with --fresh"
#: Keys of a recipe that change how a run is computed or observed, not what it computes: a resume may change them.
FREE_KEYS = re.compile(
    r"train\.(micro_batch|compile|threads|shard|recompute|deterministic|init_from\.(source|weights))|data\.workers|"
    r"checkpoint\..*|validation\.(every|prompts|sample_tokens|temperature|top_k)|track.*"
)
_FORMAT = 4  # of run.json
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


@dataclass
class Run:
    path: Path
    recipe: BaseRecipe
    info: dict[str, Any]
    lock: BaseFileLock | None = field(default=None, repr=False)  # held while this process trains the run

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_finished(self) -> bool:
        return self.info.get("status") == "finished"

    @property
    def status(self) -> str:
        return status_of(self.path, self.info)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def update(self, **changes: Any) -> None:
        """Change facts in `run.json`; the recipe is written with them."""
        if self.lock is not None and not (self.path / INFO).is_file():
            raise LapError(
                f"{self.path} was moved or removed while it was being trained; nothing more is written. "
                "Restore the folder to resume with the same command, which otherwise starts a new run."
            )
        self.info.update(changes, updated=now())
        write_json(self.path / INFO, {"format": _FORMAT, **self.info, "recipe": recipe_to_dict(self.recipe)})

    def check_tokenizer(self, sha256: str) -> None:
        if self.info.get("tokenizer_sha256") not in (None, sha256):
            raise DataError(
                f"{self.path / TOKENIZER} is not the tokenizer that the model was trained with (its sha256 differs); "
                f"restore it from a backup, or {TRAIN_AGAIN}"
            )


def check_name(name: str, next_step: str = "use --name") -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:60]!r} is not a valid run name: use ASCII letters, digits and, after the first one, . _ + -; "
            f"{next_step}"
        )


def open_run(
    runs_dir: Path,
    name: str,
    recipe: BaseRecipe,
    fresh: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Run:
    """Open the run of that name to train it, locked by this process unless it is finished.

    `fresh` moves an existing run aside. `say` receives each line that a user should know about the resume.
    """
    check_name(name)
    path = runs_dir / name
    if (path / INFO).is_file():  # anything else at that place is not ours to move
        if fresh:
            say(f"the previous run is now {_move_aside(path)}")
        elif (finished := read_run(path)).is_finished and not changes(finished, recipe):
            return finished  # without a lock: it is only read
    lock = _claim(path)
    try:
        # Read after taking the lock: another process may have trained it until then.
        run = read_run(path) if (path / INFO).is_file() else None
        if run is None or is_untrained(run):  # after a typo in --data, say: there is nothing to lose
            run = _create(path, recipe)
        elif differing := changes(run, recipe):
            lines = "\n".join(f"  {key}: {_short(old)} in the run, {_short(new)} now" for key, old, new in differing)
            raise UsageError(
                f"{path} was started with another recipe:\n{lines}\n"
                "Use --name for a new run beside it, or --fresh to move the old one aside."
            )
        elif not run.is_finished:
            _resume(run, recipe, say)
    except BaseException:
        lock.release()
        raise
    run.lock = lock
    return run


def _resume(run: Run, recipe: BaseRecipe, say: Callable[[str], None]) -> None:
    warn_about_edits(run, say)
    for key, old, new in differing_keys(recipe_to_dict(run.recipe), recipe_to_dict(recipe)):
        consequence = ": the last bits of later steps may differ" if key.startswith("train.") else ""
        say(f"{key} was {_short(old)} and is {_short(new)}{consequence}")
    run.recipe = recipe
    write_text(run.path / RECIPE, to_yaml(recipe))
    run.update(status="running", recipe_sha256=recipe_hash(recipe), **_process())


def _claim(path: Path) -> BaseFileLock:
    """Make the folder of a run, unless it exists, and take its lock.

    A folder without `run.json` may only contain what a killed start leaves behind: hidden files and a recipe.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        foreign = [each.name for each in path.iterdir() if each.name[0] != "." and each.name != RECIPE]
    except OSError as error:
        raise UsageError(f"{path} cannot be created ({error.strerror}); choose another --name or --runs-dir") from None
    if foreign and not (path / INFO).exists():
        raise UsageError(f"{path} is not a run directory: it has {foreign[0]} but no {INFO}; choose another --name")
    return take_lock(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run; UsageError if it is being trained, here or on another machine."""
    lock = take_lock(path)
    try:
        yield
    finally:
        lock.release()


def _create(path: Path, recipe: BaseRecipe) -> Run:
    info = {"objective": recipe.objective, "status": "running", "step": 0, "seed": recipe.seed, "created": now()}
    run = Run(path, recipe, {**info, "recipe_sha256": recipe_hash(recipe), "versions": versions(), **_process()})
    (path / METRICS).unlink(missing_ok=True)  # of an untrained run
    write_text(path / RECIPE, to_yaml(recipe))
    run.update()  # last: it makes the folder a run
    return run


def _move_aside(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    with locked(path):
        os.rename(path, aside)
    return aside


def discard_untrained(run: Run) -> None:
    """Remove a run that this process created and that has no steps, with the lock."""
    if run.lock is not None and run.path.is_dir() and is_untrained(run):
        shutil.rmtree(run.path, ignore_errors=True)
    unlock(run)


def unlock(run: Run) -> None:
    if run.lock is not None:
        run.lock.release()
    run.lock = None


def take_lock(path: Path) -> BaseFileLock:
    """Take a run's lock, which the kernel frees however the process ends."""
    # Two threads of one process may train different runs, and a reader holds the lock for an instant.
    lock = FileLock(path / LOCK, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        info: dict[str, Any] = {}
        with suppress(UsageError):
            info = read_info(path)
        who = f"process {info.get('pid', '?')} on {info.get('host', '?')}"
        raise UsageError(f"{path} is being trained by another process ({who}); wait for it or use --name") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UsageError(f"{path} cannot be locked ({error.strerror}); choose another --runs-dir") from None
        log.warning("warning: the file system of %s has no locks: make sure that no second process trains it", path)
    return lock


def changes(run: Run, recipe: BaseRecipe) -> list[tuple[str, Any, Any]]:
    """Return (key, the run's value, the recipe's) for each key that prevents resuming the run with that recipe."""
    differing = differing_keys(recipe_to_dict(run.recipe), recipe_to_dict(recipe))
    counts = {"train.micro_batch"} if recipe.micro_batch_counts else set()
    return [row for row in differing if row[0] in counts or not FREE_KEYS.fullmatch(row[0])]


def is_untrained(run: Run) -> bool:
    """Return whether the run has no step, no checkpoint, and no files that lap did not write."""
    made = {RECIPE, INFO, METRICS, CHECKPOINTS, TOKENIZER, *MIRRORS}
    steps = run.metrics.read_text(errors="replace") if run.metrics.is_file() else ""
    is_ours = all(path.name in made or path.name.startswith(".") for path in run.path.iterdir())
    return is_ours and '"loss"' not in steps and not any(run.checkpoints.glob("*"))


def warn_about_edits(run: Run, say: Callable[[str], None]) -> None:
    """Report which keys were edited in `recipe.yaml`, which is only a copy of the recipe in `run.json`."""
    file = run.path / RECIPE
    try:
        if file.read_text(encoding="utf-8") == to_yaml(run.recipe):
            return
        edited = load_recipe(file, is_kept=True)
        keys = [key for key, _, _ in differing_keys(recipe_to_dict(run.recipe), recipe_to_dict(edited))]
    except (OSError, UnicodeDecodeError, RecipeError) as error:
        say(f"{file} cannot be read ({str(error).splitlines()[0]}): the recipe in {INFO} is used")
        return
    if keys:
        say(f"{file} was edited ({', '.join(keys)}): the run's own values, in {INFO}, are used")


def _process() -> dict[str, Any]:
    """Return the process that trains the run, for messages about a locked run."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _short(value: Any) -> str:
    return json.dumps(value)[:60]


def status_of(path: Path, info: dict[str, Any]) -> str:
    """Return the status in `run.json`, except that a run whose process is gone is interrupted, not running."""
    if info.get("status") != "running":
        return str(info.get("status"))
    try:
        with (path / LOCK).open("rb") as file:
            # Shared, so that two simultaneous readers do not take each other for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass
    except OSError:  # held by its process, or it cannot be known: no permission, or a file system without locks
        return "running"
    return "interrupted"


def read_run(path: Path) -> Run:
    info = read_info(path)
    recipe = recipe_from_dict(info.pop("recipe"), str(path / INFO))
    if not isinstance(recipe, BaseRecipe):
        raise UsageError(f"{path} does not contain a run's recipe; name another run")
    return Run(path, recipe, info)


def read_info(path: Path) -> dict[str, Any]:
    """Read `run.json` of a run, with its recipe as plain values."""
    try:
        info = read_json(path / INFO, TRAIN_AGAIN)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} is not a run directory: it has no {INFO}; name another") from None
    if info.pop("format", None) != _FORMAT:
        raise DataError(f"{path / INFO} was written by another version of lap; {TRAIN_AGAIN}")
    for key, kind in (("objective", str), ("status", str), ("step", int), ("recipe", dict)):
        if not isinstance(info.get(key), kind):
            raise DataError(f"{path / INFO} is damaged (its {key}); restore it from a backup, or {TRAIN_AGAIN}")
    return info


def write_summary(run: Run, summary: dict[str, Any]) -> None:
    write_json(run.path / SUMMARY, summary)


def read_summary(run: Run) -> dict[str, Any]:
    """Read the results of a finished run: first and last validation, samples. Empty if there are none."""
    try:
        return read_json(run.path / SUMMARY, TRAIN_AGAIN)
    except FileNotFoundError:
        return {}


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs, by name."""
    return sorted(path.parent for path in folder.glob(f"*/{INFO}") if not path.parent.name.startswith("."))


def named_run(runs_dir: Path, name: str) -> Run:
    """Read a run by its name in `runs_dir`, or by its folder."""
    path = Path(name) if (Path(name) / INFO).is_file() else runs_dir / name
    if not path.is_dir():
        raise unknown_run(runs_dir, name)
    run = read_run(path)
    warn_about_edits(run, lambda text: log.warning("warning: %s", text))
    return run


def check_start(source: str, runs_dir: Path) -> None:
    """Refuse a missing source of weights (`train.init_from`), without opening it."""
    if source.startswith(RUN):
        named_run(runs_dir, source.removeprefix(RUN).partition("@")[0])
    elif not source.startswith(TIMM) and not Path(source).expanduser().exists():
        is_run = (runs_dir / source.partition("@")[0]).is_dir()
        near = f"; did you mean run:{source}?" if is_run else f"; {SOURCES_OF_WEIGHTS}"
        raise UsageError(f"there is no {source[:200]}{near}")


def unknown_run(runs_dir: Path, name: str) -> UsageError:
    """Return the error for a name that no run has, with the nearest name and the existing runs, newest first."""
    paths = sorted(runs_in(runs_dir), key=lambda path: (path / INFO).stat().st_mtime, reverse=True)
    hint = known_names(name, [path.name for path in paths])
    return UsageError(f"there is no run {name[:80]} in {runs_dir}{hint} (lap runs lists them, --runs-dir names others)")


def find_run(runs_dir: Path, name: str | None, objectives: set[str]) -> Run:
    """Return the finished run of that name or path, or the newest, if its objective is one of `objectives`."""
    if name is None:
        return newest_run(runs_dir, objectives)
    run = named_run(runs_dir, name)
    kinds = " or ".join(sorted(objectives))
    if run.info.get("objective") not in objectives:
        raise UsageError(f"{run.path} is a run of {run.info.get('objective')}, and {kinds} is needed; use --run")
    if not run.is_finished:
        raise UsageError(f"{run.path} is {run.status}, not finished; finish it first, or use --run")
    return run


def newest_run(runs_dir: Path, objectives: set[str]) -> Run:
    """Return the newest finished run of one of `objectives`; a damaged run fails, since it could be the newest."""
    candidates: list[tuple[float, Path]] = []
    for path in runs_in(runs_dir):
        try:
            info = read_info(path)
        except UsageError as error:
            raise DataError(f"{error}, or name the run that you mean with --run") from None
        if info.get("status") == "finished" and info.get("objective") in objectives:
            candidates.append((time_of(info), path))
    if not candidates:
        raise UsageError(f"no finished run of {' or '.join(sorted(objectives))} in {runs_dir}; train one or use --run")
    newest = read_run(max(candidates)[1])
    say_start(f"{newest.path} is the newest finished run that fits; name another to choose it")
    return newest


def time_of(info: dict[str, Any]) -> float:
    """Return the last update's time in `run.json`, 0 if unreadable; unlike a file's time it survives copying."""
    try:
        return datetime.fromisoformat(str(info.get("updated"))).timestamp()
    except ValueError:
        return 0.0


def versions() -> dict[str, str]:
    packages = ("torch", "numpy", "tokenizers", "safetensors", "timm", "pillow")
    return {"lap": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}


def now() -> str:
    return datetime.now().astimezone().isoformat()
