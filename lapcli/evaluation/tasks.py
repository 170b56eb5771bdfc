"""The tasks available for each model, their settings, and the request of one `lap eval`.

torch is not imported here, nor lm-eval unless a name is not one of ours, so that errors are reported at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lapcli.evaluation.benchmarks import BENCHMARKS, PAPER_TASKS
from lapcli.recipe import OBJECTIVES
from lapcli.recipe.loading import apply_overrides, check_recipe
from lapcli.recipe.reading import Document, RecipeError, differing_keys
from lapcli.recipe.schema import CHAT, CLASSES, FEATURES, LANGUAGE
from lapcli.recipe.section import Count, Fraction, NonNegative, Positive, Section, Size, Text, Whole, combination
from lapcli.result_rows import Direction
from lapcli.runs import Run
from lapcli.runtime.environment import require_extra
from lapcli.runtime.errors import UsageError

IMAGE_TASKS = {"top1": CLASSES, "top5": CLASSES, "linear": FEATURES, "knn": FEATURES, "ade20k": FEATURES}

SEED = 1234  # lm-eval's default, so that the few-shot examples are the ones that it draws


# The paper names linear, knn and ade20k and gives no settings; the defaults are those of the DINOv3 evaluation scripts,
# and for answers nanochat's. `--set` changes them, and every result lists those that differ from the defaults.

#: Short side to 256, then the centre of 224, for images of 224 pixels; the same ratio for other sizes.
CROP_RATIO = 224 / 256
Seed = Annotated[Whole, Field(ge=0, lt=2**62)]
Share = Annotated[float, Field(gt=0, le=1)]


class Protocol(Section):
    """The settings of one task."""

    def conditions(self) -> dict[str, Any]:
        """Return the settings that differ from the default; the source of the data does not count as a change."""
        used, default = self.model_dump(mode="json"), type(self)().model_dump(mode="json")
        return {key: new for key, _, new in differing_keys(default, used) if key != "data"}


class LinearProtocol(Protocol):
    """A linear classifier on class token and mean patch of the last block, after the final norm."""

    rates: Annotated[list[Positive], Field(min_length=1, max_length=1000)] = Field(
        default_factory=lambda: [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
    )  # each is scaled by batch / 256
    batch: Count = 512  # of all processes: 128 on each of the paper's 4 GPUs
    steps: Count = 12_500  # 10 epochs of 1,250 steps in DINOv3's eval/linear.py
    scale: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = Field(
        default_factory=lambda: [0.08, 1.0], description="two shares of the area, or null for whole images"
    )
    flip: Fraction = 0.5
    crop_ratio: Share = CROP_RATIO  # of the shorter side, when evaluating
    seed: Seed = 0

    @combination("scale")
    def _from_small_to_large(self) -> str | None:
        return "must go from the smaller share to the larger" if self.scale and self.scale[0] > self.scale[1] else None


class KnnProtocol(Protocol):
    """A vote of the nearest training images by cosine similarity of the class token, after the final norm."""

    neighbours: Annotated[list[Count], Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: [10, 20, 100, 200]
    )
    temperature: Positive = 0.07
    crop_ratio: Share = CROP_RATIO


class Ade20kProtocol(Protocol):
    """Batch norm and a 1 x 1 convolution on the patch tokens of the last block, after the final norm."""

    data: Text = "hub:zhoubolei/scene_parse_150"  # or a folder: the official layout, or parquet files
    window: Size = 512  # pixels; the nearest multiple of the patch is taken
    batch: Count = 16  # of all processes
    steps: Count = 40_000
    lr: Positive = 1e-3
    weight_decay: NonNegative = 1e-3
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    scale: Annotated[list[Positive], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0.5, 2.0])
    validate_every: Count = 5_000  # the best of these validations and the last is the result
    seed: Seed = 0

    @combination("scale")
    def _from_small_to_large(self) -> str | None:
        return "must go from the smaller to the larger" if self.scale[0] > self.scale[1] else None


class Sampling(Protocol):
    """Answers under the paper's protocol: nanochat's pass@k, and the length of its evaluations."""

    samples: Count = 10
    temperature: NonNegative = 1.0
    top_k: Count = 50
    max_tokens: Count = 512


class Settings(Section):
    linear: LinearProtocol = LinearProtocol()
    knn: KnnProtocol = KnnProtocol()
    ade20k: Ade20kProtocol = Ade20kProtocol()
    sampling: Sampling = Sampling()


def read_settings(overrides: Sequence[str], sections: Sequence[str]) -> Settings:
    """Apply overrides such as `linear.steps=100` to the default settings; report all problems at once.

    `sections`: the sections of the tasks.
    """
    for text in overrides:
        section = text.partition("=")[0].partition(".")[0].strip()
        if section in Settings.model_fields and section not in sections:
            raise UsageError(f"--set {text[:60]}: none of the tasks has the settings section {section}; leave it out")
    document, problems = apply_overrides(Document({}, {(): "--set"}), overrides)
    settings, wrong = check_recipe(Settings, document)
    if settings is None or problems:
        raise RecipeError("--set", problems + wrong)
    return settings


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
        """Return value, standard error, unit and direction of each metric; image tasks have one, the task's name."""
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
