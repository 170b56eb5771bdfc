"""What `lap eval` can measure: a registry of evaluators keyed by the kind of run, that is its objective.

An evaluator names its tasks and measures some of them on the weights of a run. One that needs a library of its own
imports it when it is asked, so that listing the tasks costs nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lapcli.errors import UsageError
from lapcli.runs import Run
from lapcli.training.checkpoint import Checkpoint
from lapcli.training.distributed import World


@dataclass(frozen=True)
class Score:
    """One task's number, with what is needed to trust it."""

    task: str
    value: float
    count: int  # what it was measured on: images, questions
    interval: tuple[float, float]  # 95%
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """A run's weights to measure, and how."""

    run: Run
    checkpoint: Checkpoint
    tasks: Sequence[str]
    world: World
    batch: int | None = None
    data: Path | None = None  # instead of the run's own


@dataclass(frozen=True)
class Measured:
    scores: list[Score]
    data: str  # where it came from
    data_sha256: str


@dataclass(frozen=True)
class Evaluator:
    tasks: Mapping[str, str]  # name: what it measures
    module: str  # has `evaluate(request: Request) -> Measured`

    @property
    def evaluate(self) -> Callable[[Request], Measured]:
        return import_module(self.module).evaluate


EVALUATORS: dict[str, Evaluator] = {
    "classification": Evaluator(
        {"top1": "share of images whose class is the first guess", "top5": "... is among the first five guesses"},
        "lapcli.evaluation.classification",
    ),
}


def chosen_tasks(objective: str, text: str | None) -> list[str]:
    """The tasks of a comma-separated list, all of the kind's if there is none."""
    if objective not in EVALUATORS:
        raise UsageError(f"a run of {objective} has no evaluation tasks yet; runs of {', '.join(EVALUATORS)} have")
    known = EVALUATORS[objective].tasks
    names = list(known) if text is None else list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"--tasks: no task {name[:60]!r} for a run of {objective}; there are {', '.join(known)}")
    return names


def wilson_interval(successes: int, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95% score interval of a proportion; within [0, 1] and of some width even at 0 and 1."""
    share = successes / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
