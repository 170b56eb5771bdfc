"""What can be measured of which model, and the request: the tasks and every setting of one `lap eval`.

torch is not imported here, nor lm-eval unless a name is not one of ours, so that a mistake is refused at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lapcli.evaluation.benchmarks import BENCHMARKS, PAPER_TASKS
from lapcli.evaluation.probe_settings import ProbeSettings, read_probe_settings
from lapcli.recipe import OBJECTIVES
from lapcli.recipe.schema import CHAT, CLASSES, FEATURES, LANGUAGE
from lapcli.result_rows import Direction, row
from lapcli.runs import Run
from lapcli.runtime.environment import require_extra
from lapcli.runtime.errors import UsageError

IMAGE_TASKS = {"top1": CLASSES, "top5": CLASSES, "linear": FEATURES, "knn": FEATURES, "ade20k": FEATURES}
STOCK = "a stock model"  # in place of the objective of a run; its features can be measured

# The paper gives no sampling settings; these are nanochat's: of its pass@k, and the length of its evaluations.
SAMPLING: dict[str, Any] = {"samples": 10, "temperature": 1.0, "top_k": 50, "max_tokens": 512}
SEED = 1234  # lm-eval's default, so that the few-shot examples are the ones that it draws
_OF_LANGUAGE = {*SAMPLING, "seed", "protocol", "unsafe_code_execution", "fresh"}


@dataclass(frozen=True)
class Request:
    """One evaluation, checked and complete; `run` is None for a stock model."""

    run: Run | None
    tasks: Sequence[str]
    data: Path | None = None  # instead of the run's own, or the hub's
    limit: int | None = None  # at most this many examples of each task
    batch: int | None = None  # examples in one forward of a process
    protocol: str = "harness"  # of language tasks
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(SAMPLING))  # under the paper's protocol
    seed: int = SEED
    unsafe_code_execution: bool = False
    fresh: bool = False
    probes: ProbeSettings = field(default_factory=ProbeSettings)


@dataclass(frozen=True)
class Score:
    """One task's score, and all that a row of results has to say about it."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return value, standard error, unit and direction of each metric; an image task has one, of its own name."""
        stderr = None if self.interval is None else (self.interval[1] - self.interval[0]) / (2 * 1.96)
        own = {"value": self.value, "stderr": stderr, "unit": self.unit, "direction": self.direction}
        return self.details.get("metrics") or {self.task: own}

    def rows(self, **known: Any) -> list[dict[str, Any]]:
        """Return the rows of results; `known` are further columns."""
        known |= {"n": self.count, "protocol": self.protocol, "conditions": self.conditions}
        known |= {"data": self.data, "data_sha256": self.data_sha256}
        return [row(self.task, metric, **numbers, **known) for metric, numbers in self.metrics().items()]


def new_request(
    run: Run | None,
    tasks: str | None = None,
    *,
    data: Path | None = None,
    limit: int | None = None,
    batch: int | None = None,
    **options: Any,
) -> Request:
    """Check tasks and options; those of `options` that are None or False were not given."""
    objective = STOCK if run is None else run.recipe.objective
    gives = _gives(objective)
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    names = chosen_tasks(objective, tasks, given.get("protocol", "paper" if CHAT in gives else "harness"))
    for name in given:
        needed = LANGUAGE if name in _OF_LANGUAGE else FEATURES
        if needed not in gives:
            kinds = [kind for kind in OBJECTIVES if needed in _gives(kind)]
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect for {_described(objective)}, only for "
                f"{' and '.join(kinds)}; leave it out"
            )
    probes = read_probe_settings(given.pop("set", []), names)
    common: dict[str, Any] = {"data": data, "limit": limit, "batch": batch, "probes": probes}
    if LANGUAGE not in gives:
        return Request(run, names, **common)
    protocol = _protocol(given.pop("protocol", None), gives)
    sampling = {name: given.pop(name) for name in SAMPLING if name in given}
    if protocol == "harness" and sampling:
        raise UsageError(
            f"--{next(iter(sampling)).replace('_', '-')} has no effect with --protocol harness, whose tasks bring "
            "their own sampling; leave it out, or use --protocol paper"
        )
    sampling = {**SAMPLING, **sampling}
    if sampling["temperature"] == 0 and sampling["samples"] > 1:
        raise UsageError(
            f"at --temperature 0 all {sampling['samples']} samples of a question are the same; use --samples 1, or a "
            "temperature above 0"
        )
    for name in names:
        if name in BENCHMARKS:
            BENCHMARKS[name].check(gives, data)
        elif data is not None:
            raise UsageError(f"--data is not for {name}, whose files lm-eval finds itself; leave it out")
    return Request(run, names, protocol=protocol, sampling=sampling, **given, **common)


def _protocol(given: str | None, gives: frozenset[str]) -> str:
    protocol = given or ("paper" if CHAT in gives else "harness")
    if protocol not in ("paper", "harness"):
        raise UsageError(f"--protocol takes paper or harness, got {protocol[:40]!r}")
    if protocol == "paper" and CHAT not in gives:
        raise UsageError(
            "--protocol paper asks in chat form, which this run has not learned; use --protocol harness, or the run "
            "of `lap sft`"
        )
    return protocol


def evaluated_objectives() -> list[str]:
    return [name for name in OBJECTIVES if tasks_of(name)]


def tasks_of(objective: str) -> list[str]:
    """Return the tasks that `lap` has for the models of an objective, or for a stock model."""
    gives = _gives(objective)
    return [
        *(task for task, needed in IMAGE_TASKS.items() if needed in gives),
        *(BENCHMARKS if LANGUAGE in gives else ()),
    ]


def chosen_tasks(objective: str, text: str | None, protocol: str = "harness") -> list[str]:
    """Read a comma-separated list of tasks; by default those that belong to the objective."""
    known, gives = tasks_of(objective), _gives(objective)
    if not known:
        raise UsageError(f"{_described(objective)} has no evaluation tasks; {', '.join(evaluated_objectives())} have")
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
            raise UsageError(f"--tasks: {name} cannot be measured of {_described(objective)}; {there_are}")
        if LANGUAGE in gives and protocol == "paper":
            raise UsageError(f"--tasks: {name[:60]!r}: {there_are}; lm-eval's other tasks need --protocol harness")
        others: Sequence[str] = ()
        if LANGUAGE in gives:
            from lapcli.evaluation.harness.lm_eval_tasks import index

            others = index().all_tasks
        if name not in others:
            near = get_close_matches(name, [*known, *others], 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"--tasks: there is no task {name[:60]!r} for {_described(objective)}{hint}; {there_are}")
    return names


def _gives(objective: str) -> frozenset[str]:
    return frozenset({FEATURES}) if objective == STOCK else OBJECTIVES[objective].gives


def _described(objective: str) -> str:
    return objective if objective == STOCK else f"a run of {objective}"


def wilson_interval(successes: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a proportion: within [0, 1], and never of width 0, not even at 0 and 1."""
    share = successes / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
