"""Opening a run to train it. A run is never overwritten: an unfinished one is resumed, a finished one is reported, and
one whose recipe differs is refused with the keys.

A new run is prepared in `.NAME.new` and then renamed, so that it appears complete or not at all. With `fresh` it is
renamed only when it is ready for its first step, after the old run is moved aside to `NAME.old-1`:

    NAME        old run, locked          NAME.old-1   old run              NAME.old-1   old run
    .NAME.new   new run, locked    ->    .NAME.new    new run, locked  ->  NAME         new run, locked

A process that is killed between the two renames leaves the middle state, which the next start undoes: `run.json` of the
new run says which folder was moved aside. A lock belongs to the file, so it follows its folder through the renames; a
process that waited for the lock of a folder that was renamed meanwhile notices that the path now has another file.
"""

import contextlib
import errno
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from lapcli.recipe import differing_keys, recipe_hash, recipe_to_dict, recipe_to_yaml
from lapcli.recipe.schema import BaseRecipe
from lapcli.runs.directory import (
    CHECKPOINTS,
    INFO,
    LOCK,
    METRICS,
    MIRRORS,
    RECIPE,
    TOKENIZER,
    Run,
    clean_up,
    now,
    plugins_of,
    read_info,
    read_run,
    trained_values,
    versions,
)
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.files import (
    Lock,
    is_same_file,
    lock_file,
    make_folder,
    move,
    open_to_write,
    read_text,
    remove,
    sha256_of_file,
    write_text,
)

#: Keys of a recipe that may have another value when a run is resumed.
KEYS_WITHOUT_EFFECT = ("data.workers", "train.init_from.source", "train.init_from.weights")
#: Keys that are only read at the end of a run: an unfinished run may be resumed with others, which `run.json` stores.
KEYS_READ_AT_END = tuple(f"validation.{key}" for key in ("prompts", "sample_tokens", "temperature", "top_k", "bigram"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_LOCK_TRIES, _LOCK_PAUSE = 20, 0.05  # `is_locked` of a reader takes the lock for an instant


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
    launches: Sequence[str] = (),
    restarted: bool = False,
) -> Run:
    """Open the run of that name, locked by this process unless it is finished.

    With `fresh`, prepare a new run beside the existing one, for `move_into_place` or `discard_untrained`. `launches`
    names the launches that this process belongs to, one on each machine. If they `restarted` the command after a rank
    died, it resumes the run that they began, even with `fresh`.
    """
    check_name(name)
    path = runs_dir / name
    _repair(path)  # first: a start that was killed may have left the run moved aside
    if not os.path.lexists(path) and (new := _prepare(path, recipe, launches, is_new=True)):
        move_into_place(new)
        return new
    if fresh and not (restarted and _was_started_by(launches, path)):
        old = _take_lock(path) if path.is_dir() else None
        try:
            prepared = _prepare(path, recipe, launches)
            assert prepared is not None
        except BaseException:
            _release(old)
            raise
        prepared.replaced_lock, prepared.replaces = old, path
        return prepared
    run = read_run(path)
    if not _must_be_replaced(run, recipe) and run.is_finished:
        return run  # without a lock: a finished run is only read
    run.lock = _take_lock(path)
    try:
        clean_up(path, is_ours=True)
        current = read_run(path)  # again: another process may have trained it before we had the lock
        run.recipe, run.info = current.recipe, current.info
        if _must_be_replaced(run, recipe):
            return _replaced(run, recipe, launches)
        if run.is_finished:
            unlock(run)
        else:
            run.info.pop("pruned", None)  # a trial that is resumed is no longer pruned
            run.update(status="running", **_process(launches), **_changed_end_keys(run, recipe))
            run.recipe = recipe
    except BaseException:
        unlock(run)
        raise
    return run


def new_run(runs_dir: Path, name: str, recipe: BaseRecipe) -> Run:
    """Prepare a run beside its place, locked, to be filled and then renamed by `move_into_place`, or discarded."""
    check_name(name)
    path = runs_dir / name
    _repair(path)
    new = None if os.path.lexists(path) else _prepare(path, recipe, [], is_new=True)
    if new is None:
        raise UsageError(f"{path} already exists; choose another name")
    return new


def update_run_info(path: Path, **facts: Any) -> None:
    """Add facts to `run.json` of a run that no process trains."""
    run = Run(path, read_run(path).recipe, {}, _take_lock(path))
    try:
        run.info = read_info(path)
        run.update(**facts)
    finally:
        unlock(run)


def _must_be_replaced(run: Run, recipe: BaseRecipe) -> bool:
    """Return whether the run has another recipe but no step yet (a typo in --data, say); UsageError if it has steps."""
    differing = changes(run, recipe)
    if not differing:
        return False
    if is_untrained(run):
        return True
    lines = "\n".join(f"  {key}: {_short(old)} in the run, {_short(new)} now" for key, old, new in differing)
    raise UsageError(
        f"{run.path} was started with another recipe:\n{lines}\n"
        "Use --name for a new run beside it, or --fresh to move the old one aside."
    )


def _replaced(run: Run, recipe: BaseRecipe, launches: Sequence[str]) -> Run:
    new = _prepare(run.path, recipe, launches)
    assert new is not None
    new.replaced_lock, run.lock = run.lock, None
    move_into_place(new, keep_old=False)
    return new


def move_into_place(run: Run, keep_old: bool = True) -> None:
    """Rename a prepared run to its place. An existing run is moved aside, or removed without `keep_old`."""
    path = _place_of(run)
    aside = _free_name(path) if keep_old else path.with_name(f".{path.name}.discarded")
    try:
        if os.path.lexists(path):
            if not keep_old:
                remove(aside, or_leave=True)  # left by a start that was killed
            run.update(moved_aside=aside.name)  # before the rename, so that a kill between the two can be undone
            move(path, aside)
        move(run.path, path)
    except OSError as error:
        discard_untrained(run)
        raise LapError(f"{path} cannot be created ({error.strerror}); choose another --name or --runs-dir") from None
    run.path = path
    _release(run.replaced_lock)
    run.replaced_lock = None
    if not keep_old:
        run.info.pop("moved_aside", None)
        remove(aside, or_leave=True)


def discard_untrained(run: Run) -> bool:
    """Discard a run that never took a step and restore the one that it replaced; return whether there was one."""
    if is_prepared(run):
        _put_back(_place_of(run), run.path, run.info)
    elif run.replaces is None:
        if run.lock is not None and is_same_file(run.lock, run.path / LOCK) and is_untrained(run):
            with contextlib.suppress(OSError):  # without permission it stays
                move(run.path, prepared := _prepared_path(run.path))
                remove(prepared)
    else:
        aside = run.path.with_name(str(run.info.get("moved_aside")))
        if not aside.is_dir() or not is_untrained(run):
            return False
        try:
            run.replaced_lock = _take_lock(aside, tries=1)
        except UsageError:  # another process trains it under its new name
            return False
        move(run.path, prepared := _prepared_path(run.path))
        _put_back(run.path, prepared, run.info)
    unlock(run)
    return run.replaces is not None


def is_prepared(run: Run) -> bool:
    """Return whether the run is still beside the place that it is to take."""
    return "name" in run.info and run.path == _prepared_path(_place_of(run))


def unlock(run: Run) -> None:
    for lock in (run.lock, run.replaced_lock):
        _release(lock)
    run.lock = run.replaced_lock = None


def changes(run: Run, recipe: BaseRecipe) -> list[tuple[str, Any, Any]]:
    """Return (key, the run's value, the recipe's) for each key that prevents resuming the run with that recipe."""
    differing = differing_keys(trained_values(run), recipe_to_dict(recipe))
    allowed = KEYS_WITHOUT_EFFECT if run.is_finished else KEYS_WITHOUT_EFFECT + KEYS_READ_AT_END
    return [row for row in differing if row[0] not in allowed]


def _changed_end_keys(run: Run, recipe: BaseRecipe) -> dict[str, Any]:
    """Return the values of `KEYS_READ_AT_END` that differ from `recipe.yaml`, for `run.json`."""
    differing = differing_keys(recipe_to_dict(run.recipe), recipe_to_dict(recipe))
    new = {key: value for key, _, value in differing if key in KEYS_READ_AT_END}
    return {"at_the_end": {**run.info.get("at_the_end", {}), **new}} if new else {}


def is_untrained(run: Run) -> bool:
    """Return whether the run has no step, no checkpoint, and no files that lap did not write."""
    made = {RECIPE, INFO, METRICS, CHECKPOINTS, TOKENIZER, *MIRRORS}
    steps = read_text(run.metrics, "replace") if run.metrics.is_file() else ""
    is_ours = all(path.name in made or path.name.startswith(".") for path in run.path.iterdir())
    return is_ours and '"loss"' not in steps and not any(run.checkpoints.glob("*"))


def _prepare(path: Path, recipe: BaseRecipe, launches: Sequence[str], is_new: bool = False) -> Run | None:
    """Prepare a run beside its place, locked; None if `is_new` and another process has taken the place meanwhile."""
    folder = _prepared_path(path)
    lock = _take_lock(folder, shown=path, make=True)
    try:
        if is_new and os.path.lexists(path):
            remove(folder, or_leave=True)
            _release(lock)
            return None
        for leftover in folder.iterdir():
            if leftover.name != LOCK:
                remove(leftover)
        write_text(folder / RECIPE, recipe_to_yaml(recipe))
        info = {
            "name": path.name,
            "objective": recipe.objective,
            "status": "running",
            "step": 0,
            "seed": recipe.seed,
            "recipe_sha256": recipe_hash(recipe),
            "recipe_file_sha256": sha256_of_file(folder / RECIPE),
            "created": now(),
            "versions": versions(),
            **({"plugins": plugins} if (plugins := plugins_of(recipe)) else {}),
            **_process(launches),
        }
        run = Run(folder, recipe, info, lock)
        run.update()
    except BaseException as error:
        remove(folder, or_leave=True)
        _release(lock)
        if isinstance(error, OSError):
            raise _not_made(path, error) from None
        raise
    return run


def _process(launches: Sequence[str]) -> dict[str, Any]:
    """Return the process that trains the run, for messages about a locked or abandoned run."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "launches": list(launches)}


def _was_started_by(launches: Sequence[str], path: Path) -> bool:
    with contextlib.suppress(UsageError):
        return not set(launches).isdisjoint(read_info(path).get("launches", []))
    return False


def _repair(path: Path) -> None:
    """Undo the half of a start that was killed; skip a start that is still under way in another process."""
    folder = _prepared_path(path)
    if not folder.is_dir():
        return
    try:
        lock = _take_lock(folder, tries=1)
    except UsageError:
        if not os.path.lexists(path):
            raise _is_busy(folder, path) from None
        return
    try:
        info = {}
        with contextlib.suppress(UsageError):
            info = read_info(folder)
        _put_back(path, folder, info)
    finally:
        _release(lock)


def _put_back(path: Path, prepared: Path, info: dict[str, Any]) -> None:
    """Move the old run back to its place, and remove the prepared one."""
    aside = path.with_name(str(info.get("moved_aside")))
    if "moved_aside" in info and not os.path.lexists(path) and os.path.lexists(aside):
        move(aside, path)
    remove(prepared, or_leave=True)


def _prepared_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _place_of(run: Run) -> Path:
    return run.path.with_name(str(run.info["name"]))


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    return aside


_locks: "weakref.WeakSet[IO[str]]" = weakref.WeakSet()


def _leave_locks_to_the_parent() -> None:
    """Close inherited locks in a forked worker: one that outlives a killed run would block the next start."""
    for handle in list(_locks):
        handle.close()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


def _take_lock(folder: Path, tries: int = _LOCK_TRIES, shown: Path | None = None, make: bool = False) -> IO[str]:
    """Take the lock of a run's folder, which `make` creates; the lock ends with this process, however it ends.

    `shown` is the folder's name in messages.
    """
    shown = shown or folder
    for attempt in range(tries):
        if attempt:
            time.sleep(_LOCK_PAUSE)
        try:
            if make:
                make_folder(folder)
            handle = open_to_write(folder / LOCK, "w")
        except FileNotFoundError:  # renamed or removed at this moment
            continue
        except OSError as error:
            if make:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only an empty one
            raise _not_made(shown, error) from None
        if lock_file(handle) is not Lock.TAKEN and is_same_file(handle, folder / LOCK):
            _locks.add(handle)
            return handle
        handle.close()
    raise _is_busy(folder, shown)


def _not_made(path: Path, error: OSError) -> LapError:
    kind = LapError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
    return kind(f"{path} cannot be created or written ({error.strerror}); choose another --runs-dir")


def _is_busy(folder: Path, shown: Path) -> UsageError:
    who = ""
    with contextlib.suppress(UsageError):
        info = read_info(folder)
        who = f" (process {info['pid']} on {info['host']})" if "pid" in info and "host" in info else ""
    return UsageError(f"{shown} is being trained by another process{who}; wait for it or use --name")


def _release(lock: IO[str] | None) -> None:
    if lock is not None:
        _locks.discard(lock)
        lock.close()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
