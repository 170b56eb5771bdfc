"""The Python interface to the commands.

import lapcli

run = lapcli.train("recipes/quickstart.yaml", {"train.steps": 10})
run = lapcli.load("quickstart")             # or one trained earlier, or another of its checkpoints
run.model, run.tokenizer, run.recipe        # of an image model: run.transform instead of a tokenizer
run.metrics                                 # the curves, a pandas frame
run.results                                 # every score and measurement, a row each
run.sample("The list")                      # continue a text, or answer a question
run.analyze("spectrum").frame               # ... and .plot(), the figure
lapcli.results(["quickstart", "baseline"])  # of several runs
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas
from torch import nn

from lapcli.analysis.analyze import Analysis, analyze
from lapcli.analysis.analyzed_models import find_models
from lapcli.analysis.measurement import Settings
from lapcli.data.images.augmentation import evaluation_transform
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation import dialogue
from lapcli.generation.engine import Engine, Sampling
from lapcli.heads.laplacianize import laplacianize
from lapcli.objectives.objective import LoadedModel
from lapcli.objectives.weights import find_checkpoint, open_run
from lapcli.recipe import BaseRecipe, find_recipe, load_recipe
from lapcli.recipe.schema import CHAT
from lapcli.result_rows import results
from lapcli.runs import Run, named_run
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import LogConsole
from lapcli.training.metrics import read_metrics
from lapcli.training.train import train_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Measured", "OpenRun", "laplacianize", "load", "results", "train"]


class Measured:
    """One measurement of a run."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis

    @cached_property
    def frame(self) -> pandas.DataFrame:
        """The values: one row for each layer."""
        rows = [
            {"run": run.model.name, "layer": layer, **result.values}
            for run in self.analysis.runs
            for layer, result in run.layers.items()
        ]
        return pandas.DataFrame(rows)

    def plot(self) -> "Figure | None":
        """Draw the figure that `lap analyze` writes; None if there is nothing to show."""
        return self.analysis.measurement.draw(self.analysis)


class OpenRun:
    """A run. Recipe and numbers are read at once, the model is loaded on first use."""

    def __init__(self, run: Run, checkpoint: str = "last") -> None:
        self.run, self.checkpoint = run, checkpoint

    def __repr__(self) -> str:
        return f"<{self.run.path}: {self.run.recipe.objective}, {self.run.status}>"

    @property
    def recipe(self) -> BaseRecipe:
        return self.run.recipe

    @property
    def metrics(self) -> pandas.DataFrame:
        """The lines of `metrics.jsonl`: a row for each step and each validation."""
        return pandas.DataFrame(read_metrics(self.run.metrics))

    @property
    def results(self) -> pandas.DataFrame:
        """The rows of `results.jsonl`."""
        return results(self.run.path)

    @cached_property
    def loaded(self) -> LoadedModel:
        return open_run(self.run, find_checkpoint(self.run, self.checkpoint))

    @property
    def model(self) -> nn.Module:
        return self.loaded.module

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.language_model()[1]

    @property
    def transform(self) -> Any:
        """The transform from an image to the pixels that the model was evaluated on, before normalisation."""
        images, size = self.loaded.images, self.loaded.image_size
        if images is None or size is None:
            raise UsageError(f"{self.run.name} is not an image model; it has a tokenizer")
        return evaluation_transform(images, size)

    def sample(self, prompt: str, max_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None) -> str:
        """Continue a text with a language model; a chat model answers."""
        model, tokenizer = self.loaded.language_model()
        is_chat = CHAT in self.run.recipe.gives
        engine = Engine(model, tokenizer, batch=1, uses_tools=is_chat)
        sampling = Sampling(max_tokens, temperature, top_k, self.run.recipe.seed)
        pieces = dialogue.sample(engine, tokenizer, prompt, sampling, 1, is_chat=is_chat)
        return "".join(text for _, text, _ in pieces)

    def analyze(self, what: str, limit: int | None = None, data: str | None = None) -> Measured:
        """Measure the run's tokens as `lap analyze WHAT` does, without writing files."""
        settings = Settings(checkpoint=self.checkpoint, limit=limit, data=data)
        (analysis,) = analyze([what], find_models(settings, [self.run]), settings)
        return Measured(analysis)


def load(run: str | Path, checkpoint: str = "last", runs_dir: Path | None = None) -> OpenRun:
    """Open a run by its name or folder; `checkpoint` is last, best or a step."""
    return OpenRun(named_run(runs_dir or default_runs_dir(), str(run)), checkpoint)


def train(
    recipe: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    seed: int | None = None,
    fresh: bool = False,
    runs_dir: Path | None = None,
) -> OpenRun:
    """Train a recipe in this process, as `lap train` does; `changes` replaces keys such as `train.steps`.

    The same call resumes an unfinished run, and returns a finished run unchanged.
    """
    path = find_recipe(recipe)
    overrides: Sequence[str] = [f"{key}={json.dumps(value)}" for key, value in (changes or {}).items()]
    loaded = load_recipe(path, overrides, seed)
    if not isinstance(loaded, BaseRecipe):
        raise UsageError(f"{path} has stages; they are trained by `lap sft {path}`")
    run_name = name or (path.stem if seed is None else f"{path.stem}-seed{seed}")
    folder = runs_dir or default_runs_dir()
    return OpenRun(train_recipe(loaded, runs_dir=folder, name=run_name, fresh=fresh, console=LogConsole()))
