"""Evaluates a run or a stock model: opens it, measures, and keeps the result.

Every metric is a row of the run's `results.jsonl`; `eval/` has one file with all details of the evaluation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lapcli.checkpoint import Checkpoint
from lapcli.data.cache import digest
from lapcli.evaluation.tasks import IMAGE_TASKS, Request, Score
from lapcli.objectives.loading import open_run, open_timm
from lapcli.objectives.objective import LoadedModel
from lapcli.result_rows import add_rows
from lapcli.runtime.files import write_json
from lapcli.runtime.ranks import joined_world
from lapcli.runtime.tables import facts, fitted

EVAL = "eval"


@dataclass(frozen=True)
class Evaluation:
    """The scores, with the model that they belong to."""

    request: Request
    subject: dict[str, Any]  # run, objective and step, or model and weights
    weights_sha256: str
    scores: list[Score]
    details: dict[str, Any]
    path: Path

    @property
    def data(self) -> str:
        return "; ".join(dict.fromkeys(score.data for score in self.scores))

    @property
    def data_sha256(self) -> str:
        hashes = list(dict.fromkeys(score.data_sha256 for score in self.scores))
        return hashes[0] if len(hashes) == 1 else digest(*hashes)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.subject,
            "weights_sha256": self.weights_sha256,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "limit": self.request.limit,
            **self.details,
            "tasks": {score.task: score.to_dict() for score in self.scores},
        }

    def to_text(self) -> str:
        rows = [["task", "metric", "value", "95% interval", "stderr", "examples"]]
        for score in self.scores:
            main = score.details.get("metric", score.task)
            for metric, numbers in score.metrics().items():
                form = ".2%" if numbers["unit"] == "fraction" else ".4f"
                ends = (score.interval or ()) if metric == main else ()
                interval = " - ".join(format(end, form) for end in ends) or "-"
                stderr = "-" if numbers["stderr"] is None else format(numbers["stderr"], form)
                rows.append([score.task, metric, format(numbers["value"], form), interval, stderr, f"{score.count:,}"])
        if mean := self.details.get("average"):
            stderr = "-" if mean["stderr"] is None else f"{mean['stderr']:.2%}"
            rows.append(["average", "", f"{mean['value']:.2%}", "-", stderr, ""])
        limit = self.request.limit
        lines = [] if limit is None else [f"only {limit:,} examples of each task (--limit)"]
        lines += fitted(rows, right=(2, 3, 4, 5))
        changed = [
            f"{score.task}: {', '.join(f'{key} {value}' for key, value in score.conditions.items())}"
            for score in self.scores
            if score.conditions
        ]
        notes = [*((score.task, score.note) for score in self.scores if score.note)]
        notes += [("not default", "; ".join(changed))] if changed else []
        notes += [(name, self.details[name]) for name in ("protocol", "settings", "dtype") if name in self.details]
        notes += self.subject.items()
        notes += [("weights", f"sha256 {self.weights_sha256}"), ("data", self.data), ("", f"sha256 {self.data_sha256}")]
        notes += [("written to", str(self.path))]
        return "\n".join(lines) + "\n\n" + facts([(f"{name:<11}", str(text)) for name, text in notes])


def evaluate_run(request: Request, weights: Checkpoint) -> Evaluation:
    """Measure the request's run on every process of the world; rank 0 writes the result."""
    run = request.run
    assert run is not None
    subject = {"run": run.name, "objective": run.recipe.objective, "step": weights.step}
    load, device = partial(open_run, run, weights), run.recipe.train.device
    return _evaluate(request, load, subject, device, run.path / EVAL, f"step-{weights.step:06d}")


def evaluate_model(request: Request, name: str, file: Path | None, runs_dir: Path) -> Evaluation:
    """Measure a stock model's features; the result is written to `eval/` in the folder of the runs."""
    load = partial(open_timm, name, weights=file)
    return _evaluate(request, load, {"model": name}, "auto", runs_dir / EVAL, name.replace(":", "_"))


def _evaluate(
    request: Request,
    load: Callable[[torch.device], LoadedModel],
    subject: dict[str, Any],
    device: str,
    folder: Path,
    name: str,
) -> Evaluation:
    with joined_world(device) as world:
        with world.together():
            loaded = load(world.device)
        weights = str(loaded.weights_sha256)
        # Machines with different copies of a model would be scored as one model.
        world.require_same({"weights": weights})
        began = time.monotonic()
        scores: list[Score] = []
        details: dict[str, Any] = {}
        if images := [task for task in request.tasks if task in IMAGE_TASKS]:
            from lapcli.evaluation.image_tasks import measure_images

            scores += measure_images(replace(request, tasks=images), loaded, world)
        if language := [task for task in request.tasks if task not in IMAGE_TASKS]:
            from lapcli.evaluation.harness.run import measure_language

            found, details = measure_language(replace(request, tasks=language), loaded, world)
            scores += found
        # The name says what was measured, the hash how: settings, weights and data.
        settings = [score.to_dict()[key] for score in scores for key in ("conditions", "protocol", "data_sha256")]
        what = "+".join(request.tasks).replace("/", "_")[:90]
        limited = "" if request.limit is None else f"_limit{request.limit}"
        path = folder / f"{name}_{what}{limited}_{digest(weights, list(request.tasks), settings)[:8]}.json"
        evaluation = Evaluation(request, subject, weights, scores, details, path)
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, evaluation.to_dict())
            if request.run is not None:
                seconds = round(time.monotonic() - began, 3)
                known = {"limit": request.limit, "step": loaded.step, "weights_sha256": weights, "seconds": seconds}
                add_rows(request.run, [row for score in scores for row in score.rows(**known)])
        # When any rank returns, the file is complete.
        world.barrier()
        return evaluation
