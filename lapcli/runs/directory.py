"""A run directory: its files, their integrity, and the run's status.

`run.json` has a checksum of itself and the sha256 of `recipe.yaml`, so that a run is read as it was written or not at
all. Version 0.1 stored neither: there the recipe's values are compared with `recipe_sha256`. Reading changes nothing;
only training writes `run.json`.
"""

import contextlib
import hashlib
import json
import os
import platform
import socket
import time
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from lapcli.recipe import load_recipe, recipe_to_dict, values_hash
from lapcli.recipe.schema import BaseRecipe
from lapcli.runtime import __version__
from lapcli.runtime.errors import DataError, LapError, UsageError
from lapcli.runtime.files import (
    Lock,
    is_alive,
    is_locked,
    is_same_file,
    lock_file,
    open_to_read,
    open_to_write,
    read_bytes,
    read_checked_json,
    remove,
    remove_leftovers,
    sha256_of_file,
    write_checked_json,
)
from lapcli.runtime.plugins import load_plugins, origin_of

LOCK, TOKENIZER = ".lock", "tokenizer.json"
RECIPE, INFO, METRICS, CHECKPOINTS, SUMMARY = "recipe.yaml", "run.json", "metrics.jsonl", "checkpoints", "summary.json"
SWEEP = "sweep.json"  # commands that a sweep has run on the weights, and whether the run was only a search
MIRRORS = ("track", "tensorboard")  # copies for trackers, which can be recreated at any time
TRAIN_AGAIN = "train the run again with --fresh"
#: Seconds without an update after which a run on another machine, whose lock cannot be seen, counts as interrupted.
LONG_SILENT = 6 * 3600
#: Types of the keys of `run.json` that commands rely on; the other keys are for people.
_KINDS: dict[str, type] = {
    "objective": str,
    "status": str,
    "step": int,
    "steps": int,
    "seed": int,
    "weights_sha256": str,
    "recipe_sha256": str,
    "recipe_file_sha256": str,
    "data_sha256": str,
    "tokenizer_sha256": str,
    "versions": dict,
    "metrics": dict,
    "at_the_end": dict,
    "plugins": list,
    "launches": list,
}
_NEEDED = ("objective", "status", "step")
_SHOWN_RUNS = 8  # in a message
_LARGEST_HEADER = 100 << 20  # bytes; safetensors itself refuses headers beyond 100 MB


@dataclass
class Run:
    path: Path
    recipe: BaseRecipe
    info: dict[str, Any]
    lock: IO[str] | None = field(default=None, repr=False)  # held while this process trains the run
    replaces: Path | None = None  # place of the run that this one, prepared by this process, is to replace
    replaced_lock: IO[str] | None = field(default=None, repr=False)  # lock of that run, until it is replaced

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_finished(self) -> bool:
        return self.info.get("status") == "finished"

    @property
    def status(self) -> str:
        """The status in `run.json`, except that a run whose process is gone is interrupted, not running."""
        return status_of(self.path, self.info)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def update(self, **changes: Any) -> None:
        """Update `run.json` atomically. A run of version 0.1 gets the sha256 of its recipe file here."""
        # Before writing: the path may by now belong to another run, whose run.json this would overwrite.
        self.check_place()
        self.info.setdefault("recipe_file_sha256", sha256_of_file(self.path / RECIPE))
        self.info.update(changes, updated=now())
        write_checked_json(self.path / INFO, dict(self.info))  # a copy: the watch of a step may add to it meanwhile

    def check_place(self) -> None:
        """Raise if the folder that this process trains in was moved or replaced: its path no longer has its lock."""
        if self.lock is not None and not is_same_file(self.lock, self.path / LOCK):
            raise LapError(
                f"{self.path} was moved, replaced or removed while it was being trained; nothing more is written. "
                "Restore the folder to resume with the same command, which otherwise starts a new run."
            )

    def check_tokenizer(self, sha256: str) -> None:
        if self.info.get("tokenizer_sha256") not in (None, sha256):
            raise DataError(
                f"{self.path / TOKENIZER} is not the tokenizer that the model was trained with (its sha256 differs); "
                f"restore it from a backup, or {TRAIN_AGAIN}"
            )

    def missing_parts(self) -> list[Path]:
        """Return the files of a finished run that are missing."""
        if not self.is_finished:
            return []
        last = self.checkpoints / f"step-{int(self.info.get('step') or 0):06d}"
        return [path for path in (self.metrics, self.path / SUMMARY, last) if not path.exists()]


def status_of(path: Path, info: dict[str, Any]) -> str:
    status = str(info.get("status"))
    return "interrupted" if status == "running" and _is_abandoned(path, info) else status


def _is_abandoned(path: Path, info: dict[str, Any]) -> bool:
    """Return whether the run's process is gone. The kernel frees the lock of a killed one; another machine's lock may
    be invisible."""
    locked = is_locked(path / LOCK)
    if locked:
        return False
    if info.get("host") == socket.gethostname():
        # `locked` is None if the lock cannot be read, as without locks; then only the process itself can tell.
        return locked is False or not is_alive(info.get("pid"))
    writes = [file.stat().st_mtime for file in (path / INFO, path / METRICS) if file.exists()]
    return time.time() - max(writes, default=0.0) > LONG_SILENT


def plugins_of(recipe: BaseRecipe) -> list[dict[str, str]]:
    """Return the entries of other packages that a run of the recipe uses, for `run.json`."""
    origins = {(sort, name): origin_of(sort, name) for sort, name in recipe.named_entries()}
    return [
        {"sort": sort, "name": name, "package": origin.package, "version": origin.version}
        for (sort, name), origin in origins.items()
        if origin is not None
    ]


def check_plugins(path: Path, info: dict[str, Any], *, reads_data: bool = False) -> None:
    """Raise DataError if a package that the run uses is not installed any more, instead of blaming the recipe.

    Data sources are only needed if the caller `reads_data`: weights and results can be read without them.
    """
    needed = [plugin for plugin in info.get("plugins", []) if reads_data or plugin["sort"] != "data source"]
    if needed:
        load_plugins()
    for plugin in needed:
        if origin_of(plugin["sort"], plugin["name"]) is None:
            raise DataError(
                f"{path} uses the {plugin['sort']} {plugin['name']} of the package {plugin['package']} "
                f"{plugin['version']}, which is not installed; install it: pip install {plugin['package']}"
            )


def read_run(path: Path) -> Run:
    info = read_info(path)
    check_plugins(path, info)
    return Run(path, _read_recipe(path / RECIPE, info), info)


def read_info(path: Path) -> dict[str, Any]:
    """Read and verify `run.json` of a run, without its recipe."""
    try:
        info = read_checked_json(path / INFO, TRAIN_AGAIN)
    except FileNotFoundError:
        raise UsageError(f"{path} is not a run directory: it has no {INFO}; name another") from None
    except OSError as error:
        raise UsageError(f"{path / INFO} cannot be read ({error.strerror}); name another run") from None
    if wrong := _what_is_wrong(info):
        raise DataError(f"{path / INFO} is damaged ({wrong}); restore it from a backup, or {TRAIN_AGAIN}")
    return info


def _what_is_wrong(info: dict[str, Any]) -> str | None:
    """Check the keys of `run.json` that commands rely on; without a checksum (version 0.1) it may hold anything."""
    for key, kind in _KINDS.items():
        if key not in info and key in _NEEDED:
            return f"it has no {key}"
        if info.get(key) is None and key not in _NEEDED:
            continue
        # bool is a subclass of int: `"step": true` would pass.
        if not isinstance(info.get(key), kind) or isinstance(info[key], bool):
            return f"{key} is {json.dumps(info[key])[:40]}"
    return None


def _read_recipe(file: Path, info: dict[str, Any]) -> BaseRecipe:
    verify_recipe_file(file, info)
    recipe = load_recipe(file, is_kept=True)
    if not isinstance(recipe, BaseRecipe):
        raise UsageError(f"{file} is not the recipe of a run; name another run")
    # Values that the run was resumed with, and that only its end reads: `recipe.yaml` still has the first ones.
    changed = {key.removeprefix("validation."): value for key, value in info.get("at_the_end", {}).items()}
    return recipe.model_copy(update={"validation": recipe.validation.model_copy(update=changed)})


def verify_recipe_file(file: Path, info: dict[str, Any]) -> None:
    """Raise DataError if a run's recipe is not the one that the run was started with."""
    try:
        content = read_bytes(file)
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}); restore it from a backup, or {TRAIN_AGAIN}"
        ) from None
    if "recipe_file_sha256" in info:
        is_unchanged = hashlib.sha256(content).hexdigest() == info["recipe_file_sha256"]
    else:
        # Version 0.1 hashed the values, not the file, so that comments and order do not count there.
        is_unchanged = info.get("recipe_sha256") in (None, values_hash(content.decode("utf-8", "replace")))
    if not is_unchanged:
        raise DataError(
            f"{file} was edited or damaged after the run was started (its sha256 is not the one in {INFO}); restore "
            f"it from a backup, or {TRAIN_AGAIN}"
        )


def trained_values(run: Run) -> dict[str, Any]:
    """Return the recipe as it was trained: in version 0.1 `layer_scale: null` meant timm's LayerScale of 1e-6."""
    values = recipe_to_dict(run.recipe)
    if values["model"].get("layer_scale", 1.0) is None and _has_layer_scale(run):
        values["model"]["layer_scale"] = 1e-6
    return values


def _has_layer_scale(run: Run) -> bool:
    """Return whether the weights have a LayerScale, by the names in their header: this needs no torch and reads no
    tensor."""
    for path in run.checkpoints.glob("step-*/model.safetensors"):
        try:
            with open_to_read(path) as file:
                # safetensors: 8 bytes with the length of the header, then the header in JSON.
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _LARGEST_HEADER)))
        except (OSError, ValueError):
            continue  # loading the weights will report what is wrong with them
        if isinstance(header, dict) and any(name.endswith(".ls1.gamma") for name in header):
            return True
    return False


def write_summary(run: Run, summary: dict[str, Any]) -> None:
    write_checked_json(run.path / SUMMARY, summary)


def read_summary(run: Run) -> dict[str, Any]:
    """Read the results of a finished run: first and last validation, samples. Empty if there are none."""
    try:
        return read_checked_json(run.path / SUMMARY, TRAIN_AGAIN)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{run.path / SUMMARY} cannot be read ({error.strerror}); check its permissions") from None


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs, by name; hidden ones are still being prepared."""
    return sorted(path.parent for path in folder.glob(f"*/{INFO}") if not path.parent.name.startswith("."))


def named_run(runs_dir: Path, name: str) -> Run:
    """Read a run by its name in `runs_dir`, or by its folder."""
    path = Path(name) if (Path(name) / INFO).is_file() else runs_dir / name
    if not path.is_dir():
        raise unknown_run(runs_dir, name)
    run = read_run(path)  # first: a folder that is not a run is not ours to clean up
    if run.status != "running":  # the lock of one that another machine trains may be invisible here
        clean_up(path)
    return run


def clean_up(path: Path, *, is_ours: bool = False) -> None:
    """Remove what killed processes have left in a run: half-written files, and checkpoints being saved or removed.

    The latter may only be removed by the holder of the run's lock; `is_ours`: this process holds it already.
    """
    for folder, names, _ in os.walk(path):
        remove_leftovers(Path(folder))
        # Checkpoints were renamed once complete. In a folder that is being written, a file that a library replaced by
        # its own has no lock and would look like a leftover.
        names[:] = [name for name in names if not name.startswith(("step-", ".writing-", ".removing-"))]
    unfinished = [folder for form in (".writing-*", ".removing-*") for folder in (path / CHECKPOINTS).glob(form)]
    if not unfinished:
        return
    with contextlib.suppress(OSError), open_to_write(path / LOCK, "a") as lock:
        if is_ours or lock_file(lock) is Lock.HELD:
            for leftover in unfinished:
                remove(leftover, or_leave=True)


def unknown_run(runs_dir: Path, name: str) -> UsageError:
    """Return the error for a name that no run has, with the nearest name and the existing runs, newest first."""
    paths = sorted(runs_in(runs_dir), key=lambda path: (path / INFO).stat().st_mtime, reverse=True)
    names = [path.name for path in paths]
    if not names:
        return UsageError(f"there is no run {name[:80]} in {runs_dir}, which has no runs; see --runs-dir")
    near = get_close_matches(name, names, 1)
    shown = ", ".join(names[:_SHOWN_RUNS]) + (f" and {more} more" if (more := len(names) - _SHOWN_RUNS) > 0 else "")
    meant = f"did you mean {near[0]}? It" if near else "it"
    return UsageError(f"there is no run {name[:80]} in {runs_dir}; {meant} has {shown} (lap runs lists them)")


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
    candidates: list[tuple[float, float, Path]] = []
    for path in runs_in(runs_dir):
        try:
            info = read_info(path)
        except UsageError as error:
            raise DataError(f"{error}, or name the run that you mean with --run") from None
        if info.get("status") == "finished" and info.get("objective") in objectives:
            # `updated` has whole seconds; the file's time decides between runs that ended in the same one.
            candidates.append((time_of(info), (path / INFO).stat().st_mtime, path))
    if not candidates:
        raise UsageError(f"no finished run of {' or '.join(sorted(objectives))} in {runs_dir}; train one or use --run")
    run = read_run(max(candidates)[2])
    clean_up(run.path)
    return run


def time_of(info: dict[str, Any]) -> float:
    """Return the time in `run.json` of the last update, 0 if it cannot be read: a copied folder keeps it, unlike its
    files' times."""
    try:
        return datetime.fromisoformat(str(info.get("updated") or info.get("created"))).timestamp()
    except ValueError:
        return 0.0


def versions() -> dict[str, str]:
    packages = ("torch", "numpy", "tokenizers", "safetensors", "timm", "pillow")
    return {"lap": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
