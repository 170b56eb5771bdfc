"""Evaluates a run: loads its weights, measures, and writes the result to the run's `eval/`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lapcli.data.cache import digest
from lapcli.evaluation.families import STOCK, ChosenTasks, choose
from lapcli.evaluation.tasks import EvaluationRequest, TaskResults
from lapcli.objectives.loading import find_checkpoint, open_run, open_timm
from lapcli.objectives.objective import LoadedModel
from lapcli.results import add_rows, row
from lapcli.runs import Run
from lapcli.runtime.files import write_json
from lapcli.runtime.ranks import World, joined_world
from lapcli.runtime.tables import fitted

EVAL = "eval"


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, with the run's checkpoint or the stock model that it belongs to."""

    run: Run | None
    step: int | None
    model: str  # the run's name, or timm:NAME
    weights_sha256: str
    measured: TaskResults
    limit: int | None
    path: Path  # of the result

    @property
    def subject(self) -> str:
        """The model that was measured, for messages."""
        return f"{self.run.path}, step {self.step}" if self.run else self.model

    def to_dict(self) -> dict[str, Any]:
        subject = (
            {"run": self.run.name, "objective": self.run.recipe.objective, "step": self.step}
            if self.run
            else {"model": self.model}
        )
        return {
            **subject,
            "weights_sha256": self.weights_sha256,
            "data": self.measured.data,
            "data_sha256": self.measured.data_sha256,
            "limit": self.limit,
            **self.measured.details,
            "tasks": {score.task: score.to_dict() for score in self.measured.scores},
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return every metric of every task as a row of results."""
        measured, rows = self.measured, []
        for score in measured.scores:
            known = {
                "n": score.count,
                "limit": self.limit,
                "protocol": measured.details.get("protocol"),
                "step": self.step,
                "weights_sha256": self.weights_sha256,
                "data": measured.data,
                "data_sha256": measured.data_sha256,
            }
            stderr = None if score.interval is None else (score.interval[1] - score.interval[0]) / (2 * 1.96)
            one = {"value": score.value, "stderr": stderr, "is_fraction": score.is_fraction}
            one["higher_is_better"] = score.higher_is_better
            for metric, numbers in score.details.get("metrics", {score.task: one}).items():
                direction = {True: "higher", False: "lower", None: None}[numbers["higher_is_better"]]
                unit = "fraction" if numbers["is_fraction"] else None
                each = {"unit": unit, "direction": direction, "stderr": numbers["stderr"], **known}
                rows.append(row(score.task, metric, numbers["value"], **each))
        return rows

    def table(self) -> list[str]:
        """Return a table for the terminal: a line per task, or the evaluator's own table."""
        if self.measured.lines:
            return self.measured.lines
        rows = [["task", "value", "95% interval", "examples"]]
        for score in self.measured.scores:
            form = ".2%" if score.is_fraction else ".4f"
            interval = " - ".join(format(end, form) for end in score.interval) if score.interval else "-"
            rows.append([score.task, format(score.value, form), interval, f"{score.count:,}"])
        return fitted(rows, right=(1, 2, 3))


def evaluate_run(
    run: Run,
    tasks: str | None = None,
    which: str = "last",
    batch: int | None = None,
    data: Path | None = None,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Measure a run on every process of the world; rank 0 writes the result."""
    chosen = choose(run.recipe.objective, tasks, options or {}, data)
    weights = find_checkpoint(run, which)
    with joined_world(run.recipe.train.device) as world:
        # Machines with different copies of a run would be scored as one model.
        world.require_same({"weights": weights.weights_sha256})
        with world.together():
            loaded = open_run(run, weights, world.device)
        measured = _measure(chosen, loaded, world, batch, data, limit)
        return _saved(loaded, measured, limit, run.path / EVAL, f"step-{weights.step:06d}", chosen, world)


def evaluate_model(
    name: str,
    weights: Path | None,
    runs_dir: Path,
    tasks: str | None = None,
    batch: int | None = None,
    data: Path | None = None,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Measure a stock model's features; the result is written to `eval/` in the folder of the runs."""
    chosen = choose(STOCK, tasks, options or {}, data)
    with joined_world() as world:
        with world.together():
            loaded = open_timm(name, world.device, weights=weights)
        sha256 = str(loaded.weights_sha256)
        world.require_same({"weights": sha256})
        measured = _measure(chosen, loaded, world, batch, data, limit)
        measured = replace(measured, details={"weights": str(loaded.file), **measured.details})
        subject = f"{name.replace(':', '_')}_{sha256[:8]}"
        return _saved(loaded, measured, limit, runs_dir / EVAL, subject, chosen, world)


def _measure(
    chosen: ChosenTasks, loaded: LoadedModel, world: World, batch: int | None, data: Path | None, limit: int | None
) -> TaskResults:
    """Measure the families one after the other and merge them into one result."""
    parts = [
        family.measure(EvaluationRequest(loaded, tasks, world, batch, data, limit, chosen.options, chosen.names))
        for family, tasks in chosen.by_family
    ]
    if len(parts) == 1:
        return parts[0]
    return TaskResults(
        [score for part in parts for score in part.scores],
        "; ".join(dict.fromkeys(text for part in parts for text in part.data.split("; "))),
        digest(*(part.data_sha256 for part in parts)),
        {name: value for part in parts for name, value in part.details.items()},
        [line for part in parts for line in part.lines],
        {name: text for part in parts for name, text in part.notes.items()},
        "_".join(part.variant for part in parts if part.variant),
    )


def _saved(
    loaded: LoadedModel,
    measured: TaskResults,
    limit: int | None,
    folder: Path,
    subject: str,
    chosen: ChosenTasks,
    world: World,
) -> Evaluation:
    """Write the evaluation, on rank 0, to a file whose name says what was measured and how; leave the world.

    After an error no rank leaves it: with NCCL that would wait for ranks which wait in a collective.
    """
    limited = "" if limit is None else f"_limit{limit}"
    variant = f"_{measured.variant}" if measured.variant else ""
    what = "+".join(chosen.names).replace("/", "_")
    if len(what) > 100:
        what = f"{what[:90]}-{digest(*chosen.names)[:8]}"
    path = folder / f"{subject}_{what}{limited}{variant}_{measured.data_sha256[:8]}.json"
    run, step = loaded.run, loaded.step
    evaluation = Evaluation(run, step, loaded.name, str(loaded.weights_sha256), measured, limit, path)
    if world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, evaluation.to_dict())
        if run is not None:
            add_rows(run, evaluation.rows())
    # When any rank returns, the file is complete.
    world.barrier()
    return evaluation
