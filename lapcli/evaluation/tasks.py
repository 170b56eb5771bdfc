"""What `lap eval` can measure: a registry of evaluators keyed by the kind of run, that is its objective.

An evaluator names its tasks and options and measures some of the tasks on the weights of a run. One that needs a
library of its own imports it when it is asked, so that listing the tasks costs nothing. An option that a kind of run
does not name is refused there, not ignored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.runs import Run
from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:  # no torch in here: a wrong name is refused at once
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint


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
    checkpoint: "Checkpoint"
    tasks: Sequence[str]
    world: "World"
    batch: int | None = None
    data: Path | None = None  # instead of the run's own
    limit: int | None = None  # only so many examples of each task
    options: Mapping[str, Any] = field(default_factory=dict)  # what was asked for, of those that the evaluator names


@dataclass(frozen=True)
class Measured:
    scores: list[Score]
    data: str  # where it came from
    data_sha256: str
    details: dict[str, Any] = field(default_factory=dict)  # what else the result has to name
    lines: list[str] = field(default_factory=list)  # a table of its own; by default value and interval of every score
    notes: dict[str, str] = field(default_factory=dict)  # lines under the table, by their first word
    variant: str = ""  # tells results of other settings apart in the name of their file


@dataclass(frozen=True)
class Evaluator:
    tasks: Mapping[str, str]  # name: what it measures
    module: str  # has `evaluate(request: Request) -> Measured`
    options: Sequence[str] = ()  # of its own, besides the batch, the data and the limit
    default: Sequence[str] | None = None  # the tasks of a call that names none; all of them if none are given
    other_tasks: bool = False  # names that are not among `tasks` are for the module to find

    @property
    def evaluate(self) -> Callable[[Request], Measured]:
        return import_module(self.module).evaluate


PAPER_TASKS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")
_LANGUAGE = Evaluator(
    {
        "arc_easy": "questions of school science, easy ones",
        "arc_challenge": "... hard ones",
        "mmlu": "questions of 57 subjects",
        "gsm8k": "word problems of school mathematics",
        "humaneval": "Python functions, by running their tests",
        "spelling": "letters in words, counted (needs no data)",
        "bpb": "bits per byte of held-out text",
    },
    "lapcli.evaluation.harness.run",
    options=(
        "protocol",
        "samples",
        "temperature",
        "top_k",
        "max_new_tokens",
        "seed",
        "show_prompt",
        "samples_out",
        "unsafe_code_execution",
        "fresh",
    ),
    default=PAPER_TASKS,
    other_tasks=True,
)

PROBES = {
    "linear": "top-1 of a linear classifier on frozen features",
    "knn": "top-1 by the nearest training images",
    "ade20k": "mean IoU of a linear segmentation head on frozen patches",
}
_PROBE_OPTIONS = ("set", "holdout")

EVALUATORS: dict[str, Evaluator] = {
    "classification": Evaluator(
        {
            "top1": "share of images whose class is the first guess",
            "top5": "... is among the first five guesses",
            **PROBES,
        },
        "lapcli.evaluation.classification",
        options=_PROBE_OPTIONS,
        default=("top1", "top5"),
    ),
    "self_supervised": Evaluator(PROBES, "lapcli.evaluation.self_supervised", options=_PROBE_OPTIONS, default=("knn",)),
    "language_model": _LANGUAGE,
    "chat": _LANGUAGE,
}
#: `--model`: no run, so no objective; what is measured is a stock model's features.
STOCK = "a stock model"
_STOCK_EVALUATOR = Evaluator(PROBES, "lapcli.evaluation.run_tasks", options=_PROBE_OPTIONS, default=("knn",))


def chosen_tasks(objective: str, text: str | None) -> list[str]:
    """The tasks of a comma-separated list, the kind's own if there is none."""
    evaluator = _evaluator(objective)
    known = evaluator.tasks
    if text is None:
        return list(known if evaluator.default is None else evaluator.default)
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known and not (evaluator.other_tasks and name):
            raise UsageError(f"--tasks: no task {name[:60]!r} for {_kind(objective)}; there are {', '.join(known)}")
    return names


def chosen_options(objective: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were asked for (neither none nor false); one that the kind of run does not have is refused."""
    evaluator = _evaluator(objective)
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    for name in chosen:
        if name not in evaluator.options:
            kinds = [kind for kind, other in EVALUATORS.items() if name in other.options]
            raise UsageError(
                f"--{name.replace('_', '-')} means nothing for {_kind(objective)}, only for {' and '.join(kinds)}; "
                "leave it out"
            )
    return chosen


def _kind(objective: str) -> str:
    return objective if objective == STOCK else f"a run of {objective}"


def _evaluator(objective: str) -> Evaluator:
    if objective == STOCK:
        return _STOCK_EVALUATOR
    if objective not in EVALUATORS:
        raise UsageError(f"a run of {objective} has no evaluation tasks yet; runs of {', '.join(EVALUATORS)} have")
    return EVALUATORS[objective]


def wilson_interval(successes: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95% score interval of a proportion; within [0, 1] and of some width even at 0 and 1."""
    share = successes / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
