"""The parts of an evaluation: families of tasks, each of which says what it needs of a model, and their scores.

torch is not imported here, nor at the top of the modules that declare families, so that a wrong name fails at once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.runs import Run

if TYPE_CHECKING:
    from lapcli.objectives.objective import LoadedModel
    from lapcli.runtime.ranks import World


@dataclass(frozen=True)
class TaskScore:
    """One task's score, with its interval and the number of examples."""

    task: str
    value: float
    count: int  # examples that it was measured on: images, questions
    interval: tuple[float, float] | None  # 95%; None: its standard error is not known
    details: dict[str, Any] = field(default_factory=dict)
    is_fraction: bool = True  # shown in percent
    higher_is_better: bool | None = True  # None: neither

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EvaluationRequest:
    """A loaded model, the tasks of one family to measure it by, and the settings."""

    loaded: "LoadedModel"
    tasks: Sequence[str]
    world: "World"
    batch: int | None = None
    data: Path | None = None  # instead of the run's own
    limit: int | None = None  # at most this many examples of each task
    options: Mapping[str, Any] = field(default_factory=dict)  # those that were given
    all_tasks: Sequence[str] = ()  # the tasks of all families

    @property
    def run(self) -> Run | None:
        """The run that the model comes from; None for a stock model."""
        return self.loaded.run

    @property
    def images_at_once(self) -> int:
        """The number of images in one forward of a process."""
        if self.batch is not None:
            return self.batch
        if self.run is None:
            return 16 if self.world.device.type == "cpu" else 128
        return self.loaded.validation_batch or self.run.recipe.train.micro_batch

    @property
    def image_workers(self) -> int:
        from lapcli.data.images.loader import count_workers

        return count_workers(getattr(self.loaded.images, "workers", "auto"), self.world.device)


@dataclass(frozen=True)
class TaskResults:
    """The scores of a family's tasks."""

    scores: list[TaskScore]
    data: str  # its source, for people
    data_sha256: str
    details: dict[str, Any] = field(default_factory=dict)  # further keys of the result
    lines: list[str] = field(default_factory=list)  # a table of its own; by default value and interval of every score
    notes: dict[str, str] = field(default_factory=dict)  # lines under the table, by their first word
    variant: str = ""  # part of the file name that tells results of other settings apart


class TaskFamily:
    """Tasks that are measured together, for every model that gives what they need.

    A kind of training may bring families of its own (`Kind.evaluations`). An option that no family of a model declares
    is an error.
    """

    needs: ClassVar[frozenset[str]]  # of a model: LANGUAGE, CLASSES, FEATURES
    measures: ClassVar[str]  # what it measures, for messages
    tasks: ClassVar[Iterable[str]]  # names
    default: ClassVar[Sequence[str]]  # the tasks if none are named
    options: ClassVar[Sequence[str]] = ()  # beside the batch, the data and the limit

    def has(self, name: str) -> bool:
        return name in self.tasks

    def near(self) -> Iterable[str]:
        """Return names to suggest for a misspelt one."""
        return self.tasks

    def check(self, tasks: Sequence[str], options: Mapping[str, Any], data: Path | None, gives: frozenset[str]) -> None:
        """Raise UsageError for what can be refused before a model is loaded; must not import torch."""

    def measure(self, request: EvaluationRequest) -> TaskResults:
        """Measure the tasks; called on every process."""
        raise NotImplementedError


def wilson_interval(successes: float, count: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a proportion: within [0, 1], and never of width 0, not even at 0 and 1."""
    share = successes / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
