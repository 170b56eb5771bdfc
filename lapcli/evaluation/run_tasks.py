"""Evaluates a run: finds its weights, measures, and keeps the result under the run's `eval/`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapcli.evaluation.tasks import EVALUATORS, STOCK, Measured, Request, Score, chosen_options, chosen_tasks
from lapcli.kinds.opening import STOCK_IMAGES, find_checkpoint
from lapcli.runs import Run
from lapcli.runtime.files import write_checked_json
from lapcli.runtime.ranks import World, join_world, leave_world

EVAL = "eval"


@dataclass(frozen=True)
class Evaluation:
    run: Run | None  # none: a stock model
    step: int | None
    weights_sha256: str
    data: str
    data_sha256: str
    scores: list[Score]
    path: Path  # where it is kept
    limit: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    model: str | None = None  # timm:NAME

    @property
    def subject(self) -> str:
        """What was measured, for people."""
        return f"{self.run.path}, step {self.step}" if self.run else str(self.model)

    def to_dict(self) -> dict[str, Any]:
        subject = (
            {"run": self.run.name, "objective": self.run.recipe.objective, "step": self.step}
            if self.run
            else {"model": self.model}
        )
        return {
            **subject,
            "weights_sha256": self.weights_sha256,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "limit": self.limit,
            **self.details,
            "tasks": {score.task: score.to_dict() for score in self.scores},
        }

    def table(self) -> list[str]:
        """For people: a line a task, or what the evaluator laid out itself."""
        if self.lines:
            return self.lines
        lines = [f"{'task':<12}{'value':>9}{'95% interval':>20}{'examples':>11}"]
        for score in self.scores:
            low, high = score.interval
            interval = f"{low:.2%} - {high:.2%}"
            lines.append(f"{score.task:<12}{score.value:>9.2%}{interval:>20}{score.count:>11,}")
        return lines


def evaluate_run(
    run: Run,
    tasks: str | None = None,
    which: str = "last",
    batch: int | None = None,
    data: Path | None = None,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Measures on every process there is; rank 0 keeps the result."""
    names = chosen_tasks(run.recipe.objective, tasks)
    chosen = chosen_options(run.recipe.objective, options or {})
    weights = find_checkpoint(run, which)
    world = join_world(run.recipe.train.device)
    try:
        world.require_same({"weights": weights.weights_sha256})
        request = Request(run, weights, names, world, batch, data, limit, chosen)
        measured = EVALUATORS[run.recipe.objective].evaluate(request)
        path = run.path / EVAL / f"step-{weights.step:06d}_{_file_name(names, limit, measured)}"
        found = Evaluation(
            run,
            weights.step,
            weights.weights_sha256,
            measured.data,
            measured.data_sha256,
            measured.scores,
            path,
            limit,
            measured.details,
            measured.lines,
            measured.notes,
        )
        _keep(found, world)
    finally:
        leave_world()
    return found


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
    """The same for a stock model's features; the result is kept under `eval/` in the folder of the runs."""
    from lapcli.data.images.loader import count_workers
    from lapcli.evaluation.backbones import TimmBackbone
    from lapcli.evaluation.probes import measure_probes, read_settings
    from lapcli.kinds.opening import open_timm
    from lapcli.recipe.vision import ImageFiles

    names = chosen_tasks(STOCK, tasks)
    settings = read_settings(names, chosen_options(STOCK, options or {}), data)
    world = join_world()
    try:
        stock = open_timm(name, world.device, weights=weights)
        assert stock.images is not None
        assert stock.weights_sha256 is not None
        mean, std = stock.images.mean, stock.images.std
        world.require_same({"weights": stock.weights_sha256})
        measured = measure_probes(
            TimmBackbone(stock.module, name=name, mean=mean, std=std, device=world.device),
            names,
            settings,
            ImageFiles(train=STOCK_IMAGES),
            world,
            batch=batch or (16 if world.device.type == "cpu" else 128),
            workers=count_workers("auto", world.device),
            limit=limit,
        )
        file = f"{name.replace(':', '_')}_{stock.weights_sha256[:8]}_{_file_name(names, limit, measured)}"
        found = Evaluation(
            None,
            None,
            stock.weights_sha256,
            measured.data,
            measured.data_sha256,
            measured.scores,
            runs_dir / EVAL / file,
            limit,
            {"weights": str(stock.file), **measured.details},
            measured.lines,
            measured.notes,
            name,
        )
        _keep(found, world)
    finally:
        leave_world()
    return found


def _file_name(tasks: list[str], limit: int | None, measured: Measured) -> str:
    limited = "" if limit is None else f"_limit{limit}"
    variant = f"_{measured.variant}" if measured.variant else ""
    what = "+".join(tasks).replace("/", "_")[:100]
    return f"{what}{limited}{variant}_{measured.data_sha256[:8]}.json"


def _keep(found: Evaluation, world: World) -> None:
    if world.is_main:
        found.path.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(found.path, found.to_dict())
    world.barrier()
