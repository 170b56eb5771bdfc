"""The runs of a folder, a line for each (kind, head plan, step, best score, age, size and status), and two compared."""

import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lapcli.recipe import differing_keys, recipe_to_dict
from lapcli.recipe.schema import RUN, TransformerModel
from lapcli.result_rows import find_paths, results
from lapcli.runs import METRICS, SWEEP, Run, read_run, runs_in
from lapcli.runtime.errors import UsageError
from lapcli.training.metrics import last_step_metrics, parse_line

SWEEPS = ".sweeps"  # in a folder of runs: locks and logs of the sweeps that trained some of them
#: Keys of `run.json`: the data, and the machine that trained.
_DATA = ("data", "data_sha256", "held_out_sha256", "tokenizer_sha256")
_MACHINE = ("device", "world_size", "threads")


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
        "kind": run.recipe.objective,
        "plan": plan_of(run),
        # While a run trains, its metrics are ahead of its last save.
        "step": max(step, last_step_metrics(run.metrics).get("step", 0)) if run.status == "running" else step,
        "steps": run.info.get("steps"),
        "best": best_validation(run),
        "seconds_since": _seconds_since(run.info.get("updated") or run.info.get("created")),
    }


def plan_of(run: Run) -> str | None:
    """Return `laplacian_heads` or `operators` as the recipe writes it."""
    model: Any = getattr(run.recipe, "model", None)
    if getattr(model, "operators", None) is not None:
        return str(model.head_plan().label())
    plan = getattr(model, "laplacian_heads", None)
    return plan if plan is None or isinstance(plan, str) else json.dumps(plan)


def best_validation(run: Run, among: Sequence[int] | None = None) -> dict[str, Any] | None:
    """Return metric, value and step of the run's best validation, the first of equals; `among`: of these steps only.

    The metric is the first of the recipe's where higher is better, else its last: top-1, k-NN, bits per byte.
    """
    lines = []
    if (file := run.path / METRICS).is_file():
        with file.open("rb") as texts:  # most lines have no validation, and are not parsed
            lines = [line for text in texts if b'"validation_' in text and (line := parse_line(text))]
    directions = {name: direction for name, (_, direction) in run.recipe.metrics.items()}
    known = [name for name in directions if any(name in line for line in lines)]
    metric = next((name for name in known if directions[name] == "higher"), known[-1] if known else None)
    # Step 0 is the validation before training: not a result of it, even where it is the best.
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


def is_of_a_sweep(path: Path) -> bool:
    """Return whether a sweep trained the run, and would train it again if it were gone."""
    work = path.parent / SWEEPS
    return any(file.exists() for file in (path / SWEEP, work / f"{path.name}.log", work / f"{path.name}.lock"))


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
