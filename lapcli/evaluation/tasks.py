"""The tasks available for each model, and the request: the tasks and all settings of one `lap eval`.

torch is not imported here, nor lm-eval unless a name is not one of ours, so that a mistake is refused at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lapcli.evaluation.benchmarks import BENCHMARKS, PAPER_TASKS
from lapcli.evaluation.settings import Settings, read_settings
from lapcli.recipe import OBJECTIVES
from lapcli.recipe.schema import CHAT, CLASSES, FEATURES, LANGUAGE
from lapcli.result_rows import Direction
from lapcli.runs import Run
from lapcli.runtime.environment import require_extra
from lapcli.runtime.errors import UsageError

IMAGE_TASKS = {"top1": CLASSES, "top5": CLASSES, "linear": FEATURES, "knn": FEATURES, "ade20k": FEATURES}

SEED = 1234  # lm-eval's default, so that the few-shot examples are the ones that it draws


@dataclass(frozen=True)
class Request:
    """One validated and complete evaluation request."""

    run: Run
    tasks: Sequence[str]
    data: Path | None = None  # instead of the run's own, or the hub's
    limit: int | None = None  # at most this many examples of each task
    batch: int | None = None  # examples in one forward of a process
    protocol: str = "harness"  # of language tasks
    seed: int = SEED
    unsafe_code_execution: bool = False
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Score:
    """One task's score with all fields of its result rows."""

    task: str
    value: float
    count: int  # examples that it was measured on: images, questions
    interval: tuple[float, float] | None  # 95%; None: its standard error is not known
    data: str  # in words
    data_sha256: str
    details: dict[str, Any] = field(default_factory=dict)  # `metrics`: all of them, of which the score is one
    unit: str | None = "fraction"
    direction: Direction | None = "higher"
    protocol: str | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)  # settings that are not the default
    note: str = ""  # below the table

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return value, standard error, unit and direction of each metric; an image task has one, of its own name."""
        stderr = None if self.interval is None else (self.interval[1] - self.interval[0]) / (2 * 1.96)
        own = {"value": self.value, "stderr": stderr, "unit": self.unit, "direction": self.direction}
        return self.details.get("metrics") or {self.task: own}


def new_request(
    run: Run,
    tasks: str | None = None,
    *,
    set: Sequence[str] = (),
    protocol: str | None = None,
    seed: int | None = None,
    unsafe_code_execution: bool = False,
    data: Path | None = None,
    **common: Any,
) -> Request:
    """Check tasks and options."""
    objective = run.recipe.objective
    gives = OBJECTIVES[objective].gives
    usual = "paper" if CHAT in gives else "harness"
    names = chosen_tasks(objective, tasks, protocol or usual)
    common["data"] = data
    if LANGUAGE not in gives:
        given = {"protocol": protocol, "seed": seed, "unsafe-code-execution": unsafe_code_execution}
        for name, value in given.items():
            if value not in (None, False):
                raise UsageError(f"--{name} has no effect for a run of {objective}; leave it out")
        return Request(run, names, settings=read_settings(set, names), **common)
    protocol = protocol or usual
    if protocol == "paper" != usual:
        raise UsageError(
            "--protocol paper uses chat prompts, on which this run was not trained; use --protocol harness, or the run "
            "of `lap sft`"
        )
    has_sampling = protocol == "paper" and any(BENCHMARKS[name].is_sampled for name in names)
    settings = read_settings(set, ["sampling"] if has_sampling else [])
    if settings.sampling.temperature == 0 and settings.sampling.samples > 1:
        raise UsageError(
            f"at sampling.temperature 0 all {settings.sampling.samples} samples of a question are identical; use "
            "--set sampling.samples=1, or a temperature above 0"
        )
    if unsafe_code_execution and "humaneval" not in names:
        raise UsageError("--unsafe-code-execution only affects humaneval; leave it out")
    for name in names:
        if name in BENCHMARKS:
            BENCHMARKS[name].check(gives, data)
        elif data is not None:
            raise UsageError(f"--data is not for {name}, whose files lm-eval finds itself; leave it out")
    language: dict[str, Any] = {"seed": SEED if seed is None else seed, "unsafe_code_execution": unsafe_code_execution}
    return Request(run, names, protocol=protocol, settings=settings, **language, **common)


def evaluated_objectives() -> list[str]:
    return [name for name in OBJECTIVES if tasks_of(name)]


def tasks_of(objective: str) -> list[str]:
    """Return the tasks that `lap` has for the models of an objective."""
    gives = OBJECTIVES[objective].gives
    return [
        *(task for task, needed in IMAGE_TASKS.items() if needed in gives),
        *(BENCHMARKS if LANGUAGE in gives else ()),
    ]


def chosen_tasks(objective: str, text: str | None, protocol: str = "harness") -> list[str]:
    """Parse a comma-separated list of tasks; by default, those of the objective."""
    known, gives = tasks_of(objective), OBJECTIVES[objective].gives
    if not known:
        raise UsageError(f"a run of {objective} has no evaluation tasks; {', '.join(evaluated_objectives())} have")
    if LANGUAGE in gives:
        require_extra("lm_eval", "eval")
    if text is None:
        return ["top1", "top5"] if CLASSES in gives else ["knn"] if FEATURES in gives else list(PAPER_TASKS)
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name in known or (LANGUAGE in gives and name and Path(name).is_file()):
            continue
        there_are = f"there are {', '.join(known)}"
        if name in IMAGE_TASKS or name in BENCHMARKS:
            raise UsageError(f"--tasks: {name} cannot be measured on a run of {objective}; {there_are}")
        if LANGUAGE in gives and protocol == "paper":
            raise UsageError(f"--tasks: {name[:60]!r}: {there_are}; lm-eval's other tasks need --protocol harness")
        others: Sequence[str] = ()
        if LANGUAGE in gives:
            from lapcli.evaluation.language_tasks import index

            others = index().all_tasks
        if name not in others:
            near = get_close_matches(name, [*known, *others], 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"--tasks: there is no task {name[:60]!r} for a run of {objective}{hint}; {there_are}")
    return names


def wilson_interval(successes: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a proportion: within [0, 1], and never of width 0, not even at 0 and 1."""
    share = successes / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
