"""The interface of a kind of training, which training, evaluation, analysis, planning and reports rely on."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lapcli.data.sources import known_set
from lapcli.recipe import load_recipe
from lapcli.recipe.schema import AnyRecipe, BaseRecipe, Source
from lapcli.recipe.vision import ImageFiles
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress

if TYPE_CHECKING:  # this module does not import torch: names are listed and refused without it
    import torch
    from torch import nn

    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.evaluation.tasks import TaskFamily
    from lapcli.kinds.initial_weights import InitialWeights
    from lapcli.models.gpt import GPT
    from lapcli.objectives.objective import BatchPlan, Objective, ParameterGroup
    from lapcli.runtime.devices import ComputePolicy
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint

#: Capabilities of models, on which evaluations and analyses depend.
LANGUAGE = "language"  # next tokens of text, with a tokenizer
CHAT = "chat"  # answers in conversations
HELD_OUT_TEXT = "held-out text"  # as in the recipe's `data`, `tokenizer` and `validation`
CLASSES = "classes"  # a class for each image
FEATURES = "features"  # class token and patches of an image

RUN = "run:"  # before the name of a run in `train.init_from`


@dataclass(frozen=True)
class TrainingStart:
    """The start of a run: its objective, facts about its data for `run.json`, and lines for the log."""

    objective: "Objective"
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def with_initial_weights(
    objective: "Objective",
    facts: dict[str, Any],
    notes: list[str],
    initial: "InitialWeights | None",
    recipe: BaseRecipe,
) -> TrainingStart:
    """Return the start of a run, after loading the weights of `initial` if the recipe has `train.init_from`."""
    if initial is not None:
        more_facts, more_notes = initial.load(objective.model, recipe)
        facts, notes = {**facts, **more_facts}, [*more_notes, *notes]
    return TrainingStart(objective, facts, notes)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what is needed to prepare its inputs."""

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
    images: "ImageFiles | None" = None  # their normalisation, and the source that it was trained on
    image_size: int | None = None  # pixels of a side
    classes: int | None = None  # of a classifier trained here

    @classmethod
    def from_run(
        cls,
        run: Run,
        checkpoint: "Checkpoint | None",
        module: "nn.Module",
        device: "torch.device",
        gives: frozenset[str],
        **known: Any,
    ) -> "LoadedModel":
        """Build it from a run; `module` has the checkpoint's weights or untrained ones, `known` are further fields."""
        return cls(
            name=run.name,
            module=module.to(device),
            gives=gives,
            weights="untrained" if checkpoint is None else "trained",
            weights_sha256=None if checkpoint is None else checkpoint.weights_sha256,
            step=0 if checkpoint is None else checkpoint.step,
            device=device,
            run=run,
            **known,
        )

    @property
    def validation_batch(self) -> int | None:
        """Batch size of validations in its run, if the recipe has one."""
        return None if self.run is None else getattr(self.run.recipe.validation, "batch", None)

    def language_model(self) -> "tuple[GPT, Tokenizer]":
        """Return the GPT and its tokenizer; UsageError for other models."""
        from lapcli.models.gpt import GPT

        if not isinstance(self.module, GPT) or self.tokenizer is None:
            raise UsageError(f"{self.name} is not a GPT; name a run of one with --run")
        return self.module, self.tokenizer


@dataclass(frozen=True)
class TrainingStep:
    """A recipe's training step on made-up data: a plan traces it without computing, a probe measures it."""

    model: "nn.Module"
    parameter_groups: Callable[[], "list[ParameterGroup]"]  # called late: a plan replaces the model's tensors
    synthetic_batch: Callable[[int, "torch.device"], Any]  # a number of examples on a device, with arbitrary values
    loss: Callable[[Any], "torch.Tensor"]  # the objective's own
    after_step: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class PlanFacts:
    """Facts about a recipe that a plan cannot compute from the training step."""

    steps: int | None  # None: the recipe has epochs, and the size of its data is not known
    data: str
    download: str = "nothing"
    download_bytes: int | None = 0  # None: not known without asking the hub
    example: str = "examples"  # what batches are counted in
    unit: str = "example"  # what FLOPs are given for
    units_per_example: int = 1
    epochs: float | None = None
    keeps_best: bool = False  # keeps the best checkpoint besides the newest
    read_seconds: float = 0.0  # of one core, to read an example; 0: negligible
    prepared_bytes: float = 0.0  # memory traffic of the device to augment an example
    lines: Mapping[str, str] = field(default_factory=dict)  # more lines of the text
    values: Mapping[str, Any] = field(default_factory=dict)  # more keys of the JSON


def describe_download(size: int | None, what: str) -> dict[str, Any]:
    """Return the fields of `PlanFacts` about a download."""
    words = f"{what}, whose size only the hub knows"
    if size is not None:
        words = f"about {size / 1e9:,.1f} GB unless it is on this machine already: {what}"
    return {"download": words, "download_bytes": size}


@dataclass(frozen=True)
class Fetched:
    """What `lap fetch` prints: `facts` as JSON, `lines` for people."""

    facts: Mapping[str, Any] | list[dict[str, Any]]
    lines: list[str]


class Kind(ABC):
    """One kind of training. Only `start`, `load` and `fetch` are required.

    `lap plan` needs `training_step`, and reports more with `plan_facts` and `micro_batch_multiple`. Recipes whose
    `model` section is a `TransformerModel` are planned quickly however many layers they have; others are traced whole.
    """

    name: ClassVar[str]  # the `objective` of its recipes
    recipe: ClassVar[type[BaseRecipe]]  # stored in a run
    recipe_file: ClassVar[type[AnyRecipe]]  # written by a user: the same, except for recipes with stages
    gives: ClassVar[frozenset[str]]
    metrics: ClassVar[tuple[str, ...]]  # metrics of a validation, which a search may optimise
    expected_scores: ClassVar[tuple[str, ...]] = ()  # evaluations that a report lists as missing
    validated_scores: ClassVar[tuple[str, ...]] = ()  # evaluations that equal the metric `validation_NAME`
    data_identity_has_seed: ClassVar[bool] = False  # `data_sha256` of runs with another seed differs
    evaluations: ClassVar[tuple["TaskFamily", ...]] = ()  # tasks of its own, besides those for `gives`

    def pinned(self, recipe: Any, path: Path, fresh: bool) -> Any:
        """Add the sha256 of files that the recipe names by location; called before the run at `path` is opened."""
        if recipe.train.init_from is None:
            return recipe
        from lapcli.kinds.initial_weights import pinned

        return pinned(recipe, path, fresh)

    @abstractmethod
    def start(self, recipe: Any, world: "World", run: Run) -> TrainingStart:
        """Prepare the data and build the objective; called on every rank."""

    @abstractmethod
    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        """Load the run's model with the weights of a checkpoint; without one, untrained, from the recipe's seed.

        `float32`: compute in float32 whatever it was trained in, so that measurements are not affected by bf16's
        rounding.
        """

    @abstractmethod
    def fetch(self, recipe: Any, progress: Progress) -> "Fetched":
        """Download and prepare everything that a run of the recipe reads."""

    def data_of(self, run: Run) -> tuple[Run, Source]:
        """Return the data that the run's model was trained on, and the run that has its recipe and tokenizer."""
        return run, run.recipe.data  # type: ignore[attr-defined]

    def load_with_data(self, path: Path, overrides: Sequence[str], data: Path) -> AnyRecipe:
        """Load the recipe with a local file or folder instead of its own source."""
        # A local copy has the hub's files but not its revisions.
        local = [f"data.train={json.dumps(str(data), ensure_ascii=False)}", "data.revision=null"]
        return load_recipe(path, [*overrides, *local])

    def run_recipes(self, recipe: Any, runs_dir: Path, run: str | None) -> dict[str, BaseRecipe]:
        """Return the recipes of the runs that a recipe file results in, by stage; the first stage starts from `run`."""
        if run is not None:
            raise UsageError(f"a recipe of {self.name} has a model of its own; leave --run out")
        return {"": recipe}

    def paper_recipe(self, recipe: Any) -> tuple[str, AnyRecipe] | None:
        """Return name and recipe of the paper's experiment that is nearest to a run's recipe; None if there is none."""
        return None

    def training_step(self, recipe: Any, device: "torch.device", policy: "ComputePolicy") -> TrainingStep:
        """Build the training step of the recipe for a policy.

        On the meta device no weight may take memory: build the model under `with device:`.
        """
        raise UsageError(f"recipes of {self.name} cannot be planned: the kind has no training_step")

    def plan_facts(self, recipe: Any, batches: "BatchPlan") -> PlanFacts:
        return PlanFacts(steps=recipe.train.steps, data="not described by the kind", epochs=recipe.train.epochs)

    def micro_batch_multiple(self, recipe: Any) -> int:
        """Return the number of which the size of a micro-batch has to be a multiple."""
        return 1


# Shared by the kinds of image training.


def fetch_images(source: ImageFiles, classes: int | None, progress: Progress) -> Fetched:
    from lapcli.data.images.sources import open_images

    data = open_images(source, classes, progress)
    facts = {
        "source": source.train,
        "classes": len(data.train.classes),
        "train_images": len(data.train),
        "validation_images": len(data.validation),
        "identity": data.identity,
    }
    lines = [
        f"{name.replace('_', ' '):<19}{f'{value:,}' if isinstance(value, int) else value}"
        for name, value in facts.items()
    ]
    return Fetched(facts, lines)


def download_facts(source: ImageFiles) -> dict[str, Any]:
    """Return the fields of `PlanFacts` about the download of a source."""
    if not source.train.startswith("hub:"):
        return {}
    return describe_download(known_set(source.train).download_bytes, source.train.removeprefix("hub:"))


def load_vit(build: "Callable[[int | None], nn.Module]", recipe: Any, checkpoint: "Checkpoint | None") -> Any:
    """Return the model that `build` makes from a seed, with the weights of the checkpoint; without one, untrained."""
    import torch

    from lapcli.training.checkpoint import load_weights

    if checkpoint is None:
        return build(recipe.seed)
    with torch.device("meta"):  # weights that are overwritten need not be drawn
        model = build(None)
    # Buffers that are not in the state dict would stay unset; these models have none.
    model.to_empty(device="cpu")
    load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
    return model
