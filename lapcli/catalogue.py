"""The functions of `lap runs`: list, compare, watch, rename, prune and remove runs.

Renaming and removing hold the lock of the run, so that a run in training is not touched. A folder is renamed
to a hidden name before it is removed: a kill in between leaves nothing that looks like a run or a checkpoint.
"""

import json
import math
import os
import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lapcli.recipe import differing_keys, recipe_to_dict
from lapcli.recipe.schema import RUN, TransformerModel
from lapcli.result_rows import find_paths, results
from lapcli.runs import (
    METRICS,
    Run,
    check_name,
    locked,
    read_info,
    read_run,
    read_summary,
    runs_in,
    status_of,
)
from lapcli.runtime.environment import require_extra
from lapcli.runtime.errors import DataError, LapError, UsageError, known_names
from lapcli.runtime.files import move, remove
from lapcli.training.metrics import last_step_metrics, parse_line, read_metrics

#: Keys of `run.json`: the data, and the machine that trained.
_DATA = ("data", "data_sha256", "held_out_sha256", "tokenizer_sha256")
_MACHINE = ("device", "world_size", "threads")
LETTERS = "abcdefgh"  # one for each run in a picture
_SHOWN = ("loss", "lr", "tokens_per_second", "images_per_second")


# Listing and comparing.


def matching_runs(runs_dir: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders of the runs with these names, folders or patterns; by default all runs."""
    return find_paths(names, runs_dir) if names else runs_in(runs_dir)


def list_runs(runs_dir: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """List runs, the most recently written first. For a damaged run, `problem` gives the reason."""
    listed = []
    for path in matching_runs(runs_dir, names):
        try:
            listed.append(summary_of(read_run(path)))
        except UsageError as error:
            damage = {"status": "damaged", "problem": str(error)}
            listed.append({"name": path.name, "path": str(path), "bytes": size_of(path), **damage})
    return sorted(
        listed, key=lambda run: (run.get("seconds_since") is None, run.get("seconds_since") or 0, run["name"])
    )


def summary_of(run: Run) -> dict[str, Any]:
    step = int(run.info.get("step") or 0)
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "bytes": size_of(run.path),
        "objective": run.recipe.objective,
        "plan": plan_of(run),
        # During training, the metrics are ahead of the last save.
        "step": max(step, last_step_metrics(run.metrics).get("step", 0)) if run.status == "running" else step,
        "steps": run.info.get("steps"),
        "best": best_validation(run),
        "seconds_since": _seconds_since(run.info.get("updated") or run.info.get("created")),
    }


def plan_of(run: Run) -> str | None:
    """Return `laplacian_heads` or `operators` in recipe notation."""
    model: Any = getattr(run.recipe, "model", None)
    if getattr(model, "operators", None) is not None:
        return str(model.head_plan().label())
    plan = getattr(model, "laplacian_heads", None)
    return plan if plan is None or isinstance(plan, str) else json.dumps(plan)


def best_validation(run: Run, among: Sequence[int] | None = None) -> dict[str, Any] | None:
    """Return metric, value and step of the run's best validation, the first among equals; `among`: of these steps only.

    The metric is the first of the recipe's where higher is better, else its last: top-1, k-NN, bits per byte.
    """
    lines = []
    if (file := run.path / METRICS).is_file():
        with file.open("rb") as texts:  # most lines have no validation, and are not parsed
            lines = [line for text in texts if b'"validation_' in text and (line := parse_line(text))]
    directions = {name: direction for name, (_, direction) in run.recipe.metrics.items()}
    known = [name for name in directions if any(name in line for line in lines)]
    metric = next((name for name in known if directions[name] == "higher"), known[-1] if known else None)
    # Step 0 is the validation before training: not a result, even if it is the best.
    values = {line["step"]: float(line[metric]) for line in lines if metric in line and line["step"] > 0}
    steps = sorted(values if among is None else values.keys() & set(among))
    if metric is None or not steps:
        return None
    step = (max if directions[metric] == "higher" else min)(steps, key=lambda step: values[step])
    return {"metric": metric, "value": values[step], "step": step}


def started_from(run: Run) -> tuple[str, str] | None:
    """Return the source of the weights that this run started from, and their sha256; a run without prefix and step."""
    init_from = run.recipe.train.init_from
    if init_from is None:
        return None
    is_run = init_from.source.startswith(RUN)
    source = init_from.source.removeprefix(RUN).partition("@")[0] if is_run else init_from.source
    return source, str(init_from.sha256)


def size_of(folder: Path) -> int:
    """Return the bytes on the disk; links are not followed, and files that disappear meanwhile do not count."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.lstat().st_blocks * 512  # POSIX counts blocks of 512 bytes
        except OSError:
            continue
    return total


def describe(run: Run) -> dict[str, Any]:
    """Return everything that `lap runs show` prints: run.json, recipe, results, checkpoints and sizes."""
    summary, model = summary_of(run), getattr(run.recipe, "model", None)
    return {
        **summary,
        "info": run.info,
        "started_from": started_from(run),
        "names_operators": isinstance(model, TransformerModel) and not model.head_plan().is_laplacian,
        "checkpoints": sorted(folder.name for folder in run.checkpoints.glob("step-*")),
        "results": scores_of(run),
        "recipe": recipe_to_dict(run.recipe),
    }


def scores_of(run: Run) -> dict[str, float]:
    """Return the results of the last weights, by task, metric and the conditions that differ from the default."""
    frame = results([run.path], run.path.parent)
    scores = {}
    for row in frame[frame.checkpoint == "last"].to_dict("records"):
        limit = "" if row["limit"] is None or row["limit"] != row["limit"] else f"limit {row['limit']:g}"  # NaN: none
        layer = "" if row["layer"] is None or row["layer"] != row["layer"] else f"layer {row['layer']:g}"
        parts = [row["task"], row["metric"] if row["metric"] != row["task"] else "", layer, limit, row["conditions"]]
        scores[" ".join(str(part) for part in parts if part)] = row["value"]
    return scores


def difference(a: Run, b: Run) -> dict[str, list[tuple[str, Any, Any]]]:
    """Compare two runs: keys of the recipe, data and versions that differ, and all results of the last weights."""
    versions = differing_keys(a.info.get("versions", {}), b.info.get("versions", {}))
    facts = {keys: [(key, a.info.get(key), b.info.get(key)) for key in keys] for keys in (_DATA, _MACHINE)}
    first, second = scores_of(a), scores_of(b)
    return {
        "recipe": differing_keys(recipe_to_dict(a.recipe), recipe_to_dict(b.recipe)),
        "data": [row for row in facts[_DATA] if row[1] != row[2]],
        "versions": [*versions, *(row for row in facts[_MACHINE] if row[1] != row[2])],
        "results": [("step", a.info.get("step"), b.info.get("step"))]
        + [(name, first.get(name), second.get(name)) for name in {**first, **second}],
    }


def _seconds_since(moment: Any) -> float | None:
    try:
        return max(0.0, time.time() - datetime.fromisoformat(str(moment)).timestamp())
    except ValueError:
        return None


# Renaming, removing and pruning.


def rename_run(run: Run, name: str) -> Path:
    """Rename a run within its folder. Its age is kept: a renamed run does not become the newest."""
    check_name(name, "choose another name")
    if names := dependent_runs(run.path):
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


def dependent_runs(path: Path) -> list[str]:
    """Return the names of the runs in the same folder that started from this one."""
    starts = {other.name: started_from(read_run(other)) for other in runs_in(path.parent) if other != path}
    return [
        name
        for name, start in starts.items()
        if start is not None and (start[0] == path.name or Path(start[0]).resolve() == path.resolve())
    ]


def refuse_running(paths: Sequence[Path]) -> None:
    """Raise if a run is in training, before any run is changed."""
    for path in paths:
        with locked(path):
            pass


def prunable(run: Run, keep: int) -> list[Path]:
    """Return the checkpoints to remove: all but the newest `keep` and the best."""
    from lapcli import checkpoint

    refuse_running([run.path])
    steps = checkpoint.steps_in(run.checkpoints)
    folders = {step: run.checkpoints / f"step-{step:06d}" for step in steps}
    if steps:
        try:
            checkpoint.read(folders[steps[-1]])
        except DataError as damage:  # an older checkpoint may be all that is left of the run
            raise UsageError(f"{run.path} is not pruned: {damage}") from None
    best = best_validation(run, among=steps)
    kept = {*steps[-keep:], read_summary(run).get("best_step"), best and best["step"]}
    return [folders[step] for step in steps if step not in kept]


def remove_checkpoints(run: Path, folders: Sequence[Path]) -> None:
    with locked(run):
        for folder in folders:
            _remove(folder, folder.with_name(f".removing-{folder.name}"))  # training removes this name too


def _remove(folder: Path, doomed: Path) -> None:
    try:
        remove(doomed, or_leave=True)  # left over by a removal that was killed
        move(folder, doomed)
        remove(doomed)
    except OSError as error:
        raise LapError(f"{folder} cannot be removed ({error.strerror}); check its permissions") from None


# Watching.


@dataclass(frozen=True)
class WatchedRun:
    """A run at one moment."""

    path: Path
    status: str
    step: int
    steps: int | None
    values: dict[str, float]  # of the last step and the last validation
    curve: list[tuple[int, float]]

    @property
    def name(self) -> str:
        return self.path.name

    def line(self) -> str:
        at = f"{self.step:,}/{self.steps:,}" if self.steps else f"{self.step:,}"
        shown = {key: v for key, v in self.values.items() if key in _SHOWN or key.startswith("validation_")}
        numbers = [f"{key} {f'{v:,.0f}' if key.endswith('_second') else f'{v:.4g}'}" for key, v in shown.items()]
        return "  ".join([f"{self.name}  step {at}", *numbers, self.status])


def chosen_runs(runs_dir: Path, names: Sequence[str], metric: str) -> list[Path]:
    """Return the named runs, else those in training, else the newest; UsageError if no run has the metric."""
    listed = [] if names else list_runs(runs_dir)
    if not names and not listed:
        raise UsageError(f"there are no runs in {runs_dir} to watch; train one, or see --runs-dir")
    training = [Path(run["path"]) for run in listed if run["status"] == "running"]
    paths = matching_runs(runs_dir, names) if names else training or [Path(listed[0]["path"])]
    named = [set[str]().union(*read_metrics(path / METRICS)) - {"step"} for path in paths]
    known = sorted(set[str]().union(*named))
    if metric not in known and all(named):  # a run without metrics may have it later
        raise UsageError(f"none of these runs has the metric {metric[:60]!r}{known_names(metric, known)}")
    return paths


def read_watched_run(path: Path, metric: str) -> WatchedRun:
    """Read the run's records so far; an incomplete line is skipped."""
    info = read_info(path)
    lines = read_metrics(path / METRICS)
    values: dict[str, float] = {}
    # A step and its validation are separate lines, and the last validation may be any number of lines back.
    for line in lines:
        values |= {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    # A non-finite loss cannot be drawn.
    curve = [(line["step"], float(line[metric])) for line in lines if metric in line and math.isfinite(line[metric])]
    step = max([int(info.get("step") or 0), *(line["step"] for line in lines[-1:])])
    return WatchedRun(path, status_of(path, info), step, info.get("steps"), values, curve)


def screen(seen: Sequence[WatchedRun], metric: str) -> str:
    """Return a plot, unless there are too many runs, and a line of text for each run."""
    width, height = shutil.get_terminal_size()
    is_drawn = len(seen) <= len(LETTERS)
    letters = [f"{letter}  " if is_drawn and len(seen) > 1 else "" for letter in LETTERS.ljust(len(seen))]
    lines = [letter + run.line() for letter, run in zip(letters, seen, strict=False)]
    shown = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="   ")]
    height = max(8, min(24, height - len(shown) - 2))
    return "\n".join([*([plot_curves(seen, metric, width, height)] if is_drawn else []), *shown])


def plot_curves(seen: Sequence[WatchedRun], metric: str, width: int, height: int) -> str:
    """Draw the curves in one plot, without colour codes: a line for one run, a letter for each of several."""
    require_extra("plotext", "watch")
    import plotext

    drawn = [run for run in seen if run.curve]
    if not drawn:
        return f"(no {metric} yet)"
    figure: Any = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(metric)
    for letter, run in zip(LETTERS, drawn, strict=False):
        # Thinned to the resolution of the columns; the last point is kept.
        points = [*run.curve[: -1 : max(1, len(run.curve) // (2 * width))], run.curve[-1]]
        steps, values = zip(*points, strict=True)
        signal = figure.signal(list(steps), list(values), marker="braille" if len(seen) == 1 else letter)
        if len(seen) == 1 and len(points) > 1:
            signal.lines()
        figure.draw(signal)
    return str(plotext.uncolorize(str(figure.build()))).rstrip("\n")
