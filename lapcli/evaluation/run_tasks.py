"""Evaluates a run: opens it, measures, and stores the results.

Every metric is a row of the run's `results.jsonl`; `eval/` has one file with all details of the evaluation.
"""

import sys
import time
from dataclasses import asdict, replace
from typing import Any

from lapcli.checkpoint import Checkpoint
from lapcli.data.files import digest
from lapcli.evaluation.tasks import IMAGE_TASKS, Request, Score
from lapcli.objectives.weights import open_run
from lapcli.result_rows import add_rows, row
from lapcli.runtime.files import write_json
from lapcli.runtime.ranks import joined_world
from lapcli.runtime.tables import facts, fitted

EVAL = "eval"


def evaluate_run(request: Request, weights: Checkpoint) -> dict[str, Any]:
    """Measure the run on every process of the world; rank 0 writes the result."""
    run = request.run
    with joined_world(run.recipe.train.device) as world:
        with world.together():
            loaded = open_run(run, weights, world.device)
        # Machines with different copies of a model would be scored as one model.
        world.require_same({"weights": weights.weights_sha256})
        began = time.monotonic()
        scores: list[Score] = []
        details: dict[str, Any] = {}
        if images := [task for task in request.tasks if task in IMAGE_TASKS]:
            from lapcli.evaluation.image_tasks import measure_images

            scores += measure_images(replace(request, tasks=images), loaded, world)
        if language := [task for task in request.tasks if task not in IMAGE_TASKS]:
            from lapcli.evaluation.language_tasks import measure_language

            found, details = measure_language(replace(request, tasks=language), loaded, world)
            scores += found
        # The name gives the tasks, the hash the settings, weights and data.
        settings = [(dict(score.conditions), score.protocol, score.data_sha256) for score in scores]
        what = "+".join(request.tasks).replace("/", "_")[:90]
        limited = "" if request.limit is None else f"_limit{request.limit}"
        how = digest(weights.weights_sha256, list(request.tasks), settings)[:8]
        path = run.path / EVAL / f"step-{weights.step:06d}_{what}{limited}_{how}.json"
        hashes = list(dict.fromkeys(score.data_sha256 for score in scores))
        record = {
            "run": run.name,
            "objective": run.recipe.objective,
            "step": weights.step,
            "weights_sha256": weights.weights_sha256,
            "data": "; ".join(dict.fromkeys(score.data for score in scores)),
            "data_sha256": hashes[0] if len(hashes) == 1 else digest(*hashes),
            "limit": request.limit,
            **details,
            "tasks": {score.task: asdict(score) for score in scores},
        }
        if world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, record)
            measured = {key: record[key] for key in ("limit", "step", "weights_sha256")}
            known = {**measured, "seconds": round(time.monotonic() - began, 3)}
            add_rows(run, [each for score in scores for each in _rows(score, known)])
            print(f"written to {path}", file=sys.stderr)
        # When any rank returns, the file is complete.
        world.barrier()
        return record


def _rows(score: Score, known: dict[str, Any]) -> list[dict[str, Any]]:
    of_task: dict[str, Any] = {"n": score.count, "protocol": score.protocol, "conditions": score.conditions}
    of_task |= {"data": score.data, "data_sha256": score.data_sha256}
    return [row(score.task, metric, **numbers, **of_task, **known) for metric, numbers in score.metrics().items()]


def to_text(evaluation: dict[str, Any]) -> str:
    """Return the table of an evaluation, and the notes needed to interpret it."""
    rows = [["task", "metric", "value", "95% interval", "stderr", "examples"]]
    notes = []
    for score in (Score(**task) for task in evaluation["tasks"].values()):
        for metric, numbers in score.metrics().items():
            form = ".2%" if numbers["unit"] == "fraction" else ".4f"
            ends = (score.interval or ()) if metric == score.details.get("metric", score.task) else ()
            interval = " - ".join(format(end, form) for end in ends) or "-"
            stderr = "-" if numbers["stderr"] is None else format(numbers["stderr"], form)
            rows.append([score.task, metric, format(numbers["value"], form), interval, stderr, f"{score.count:,}"])
        changed = ", ".join(f"{key} {value}" for key, value in score.conditions.items())
        notes += [(score.task, score.note)] if score.note else []
        notes += [(score.task, f"not default: {changed}")] if changed else []
    kept = ("protocol", "dtype", "run", "objective", "step", "weights_sha256", "data", "data_sha256")
    notes += [(name.replace("_", " "), str(evaluation[name])) for name in kept if name in evaluation]
    limit = evaluation["limit"]
    lines = [] if limit is None else [f"only {limit:,} examples of each task (--limit)"]
    return "\n".join([*lines, *fitted(rows, right=(2, 3, 4, 5)), "", facts(notes)])
