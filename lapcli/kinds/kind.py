"""What every kind of training says about itself; training, evaluation, analysis, planning and reports ask only this."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lapcli.recipe.schema import AnyRecipe, BaseRecipe, Source
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress

if TYPE_CHECKING:  # no torch in here: names are listed and refused without it
    import torch
    from torch import nn

    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.models.gpt import GPT
    from lapcli.objectives.objective import Objective
    from lapcli.recipe.vision import ImageFiles
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint

#: What models of a kind offer to evaluations and analyses.
LANGUAGE = "language"  # next tokens of text, with a tokenizer
CLASSES = "classes"  # a class for each image
FEATURES = "features"  # class token and patches of an image


@dataclass(frozen=True)
class Start:
    """What a run begins with: its objective, what `run.json` records of its data, and lines for the log."""

    objective: "Objective"
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what has to be known to feed it."""

    name: str
    module: "nn.Module"
    gives: frozenset[str]
    weights: Literal["trained", "untrained", "pretrained"]
    weights_sha256: str | None
    step: int | None
    device: "torch.device"
    run: Run | None = None
    file: Path | None = None  # of the weights
    tokenizer: "Tokenizer | None" = None  # of language models
    images: "ImageFiles | None" = None  # how images are normalised, and those it was trained on
    image_size: int | None = None  # pixels of a side
    classes: int | None = None  # of a classifier trained here

    def language_model(self) -> "tuple[GPT, Tokenizer]":
        """The GPT and its tokenizer; UsageError for other models."""
        from lapcli.models.gpt import GPT

        if not isinstance(self.module, GPT) or self.tokenizer is None:
            raise UsageError(f"{self.name} is not a GPT; name a run of one with --run")
        return self.module, self.tokenizer


class Kind(ABC):
    name: ClassVar[str]  # the `objective` of its recipes
    recipe: ClassVar[type[BaseRecipe]]  # what a run keeps
    recipe_file: ClassVar[type[AnyRecipe]]  # what a user writes: the same, but for recipes with stages
    gives: ClassVar[frozenset[str]]
    metrics: ClassVar[tuple[str, ...]]  # numbers of a validation, which a search may choose by
    expected_scores: ClassVar[tuple[str, ...]] = ()  # evaluations whose absence a report names

    @abstractmethod
    def start(self, recipe: Any, world: "World", run: Run) -> Start:
        """Prepares the data and builds the objective; called on every rank."""

    @abstractmethod
    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        """The run's model with the weights of a checkpoint; without one, untrained, as the recipe's seed draws it.

        `float32`: whatever it was trained in. Measurements are of the weights, not of bf16's rounding.
        """

    @abstractmethod
    def fetch(self, recipe: Any, progress: Progress) -> "Fetched":
        """Downloads and prepares everything that a run of the recipe reads."""

    def data_of(self, run: Run) -> tuple[Run, Source]:
        """The data that the run's model was trained on, and the run that holds its recipe and tokenizer."""
        return run, run.recipe.data  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Fetched:
    """What `lap fetch` prints: `facts` as JSON, `lines` for people."""

    facts: Mapping[str, Any] | list[dict[str, Any]]
    lines: list[str]
