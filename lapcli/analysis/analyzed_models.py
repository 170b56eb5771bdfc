"""Models to analyse: trained runs, the same models untrained, and stock timm models, each with its data."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lapcli.analysis.examples import DataOrigin, Examples, ImageExamples, TextExamples
from lapcli.analysis.measurement import Settings
from lapcli.data.files import digest
from lapcli.data.images.loader import count_workers
from lapcli.data.images.sources import open_images
from lapcli.data.text.tokens import prepare_text
from lapcli.heads.plan import HeadPlan
from lapcli.measures.capture import Anatomy, anatomy_of
from lapcli.objectives.objective import LoadedModel
from lapcli.objectives.weights import check_timm_name, find_checkpoint, open_run, open_timm, text_of
from lapcli.recipe.schema import CLASSES, FEATURES, LANGUAGE, TIMM, TextSource
from lapcli.runs import TOKENIZER, Run
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.progress import shown_progress
from lapcli.runtime.ranks import pick_device
from lapcli.same_recipe import whole_recipe

SEQUENCES = 512  # of text, without --limit
IMAGES_AT_ONCE = 64
STOCK_GIVES = frozenset({CLASSES, FEATURES})  # of timm's models, with their classifier


@dataclass(frozen=True)
class AnalyzedModel:
    """A model to analyse. `open` builds and loads it with its data, so that one model at a time is in memory."""

    name: str
    weights: str  # trained, untrained, pretrained
    step: int | None
    weights_sha256: str | None
    objective: str  # of training; that of a stock model's weights
    gives: frozenset[str]  # what measurements may need of it
    open: Callable[[], "OpenedModel"]
    path: Path | None = None  # of the run
    recipe: str | None = None  # the same for runs that differ in their seeds alone


def results_folder(models: Sequence[AnalyzedModel], runs_dir: Path) -> Path:
    """Return the run's folder, or for several models a folder with their names, so that no comparison
    overwrites another."""
    paths = {model.path for model in models}
    alone = paths.pop() if len(paths) == 1 else None
    if alone is not None:
        return alone / "analysis"
    names = sorted({re.sub(r"[^\w.+-]", "_", model.name) for model in models})
    joined = "+".join(names)
    if len(joined) > 120:
        # A file name has at most 255 bytes; the digest of all names keeps two long comparisons apart.
        joined = f"{names[0][:60]}+{len(names) - 1}-more-{digest(*names)[:6]}"
    return runs_dir / "analysis" / joined


@dataclass(frozen=True)
class OpenedModel:
    anatomy: Anatomy
    examples: Examples

    @property
    def plan(self) -> HeadPlan:
        return self.anatomy.plan


def find_models(settings: Settings, runs: Sequence[Run], stock: Sequence[str] = ()) -> list[AnalyzedModel]:
    """Return the models of the runs in their order, then the stock models, each as timm:NAME."""
    models: list[AnalyzedModel] = []
    for run in runs:
        models.append(_model_of_run(run, settings, trained=True))
        if settings.init:
            models.append(_model_of_run(run, settings, trained=False))
    models += [_stock(name, settings) for name in stock]
    if len({LANGUAGE in model.gives for model in models}) > 1:
        raise UsageError("language models and image models cannot be compared in one figure; name runs of one kind")
    return models


def _model_of_run(run: Run, settings: Settings, trained: bool) -> AnalyzedModel:
    checkpoint = find_checkpoint(run, settings.checkpoint) if trained else None

    def open_() -> OpenedModel:
        device = torch.device(pick_device(run.recipe.train.device))
        # In float32, whatever the training precision: the weights are measured, not bf16 rounding.
        loaded = open_run(run, checkpoint, device, float32=True)
        read = _text if LANGUAGE in loaded.gives else _images
        return OpenedModel(anatomy_of(loaded.module), read(loaded, settings))

    return AnalyzedModel(
        run.name,
        "untrained" if checkpoint is None else "trained",
        0 if checkpoint is None else checkpoint.step,
        None if checkpoint is None else checkpoint.weights_sha256,
        run.recipe.objective,
        run.recipe.gives,
        open_,
        run.path,
        json.dumps(whole_recipe(run).keys, sort_keys=True, default=str),
    )


def _text(loaded: LoadedModel, settings: Settings) -> TextExamples:
    """Open the model's pretraining text, or the text of --data."""
    assert loaded.run is not None
    model, tokenizer = loaded.language_model()
    base, source = text_of(loaded.run)
    assert isinstance(source, TextSource)
    if settings.data is not None:
        # The other keys describe the recipe's own source: its files, its revision and its validation text.
        changes = {"train": settings.data, "files": None, "revision": None, "validation": None}
        source = source.model_copy(update=changes)
    recipe: Any = loaded.run.recipe
    # The run's own tokenizer: a tokenizer trained on the --data text would not match the model's embedding.
    section = recipe.tokenizer.model_copy(update={"file": str(loaded.run.path / TOKENIZER)})
    with shown_progress() as progress:
        data = prepare_text(source, section, progress=progress)
    if settings.data is None and base.info.get("data_sha256") not in (None, data.identity):
        raise DataError(f"the text of {base.path} has changed since it was trained; name the text with --data")
    return TextExamples(
        data.train if settings.split == "train" else data.validation,
        tokenizer,
        DataOrigin(data.description, data.identity, settings.split),
        context=model.config.context,
        limit=settings.limit or SEQUENCES,
        device=loaded.device,
    )


def _images(loaded: LoadedModel, settings: Settings) -> ImageExamples:
    """Open the images of the model's run, or of --data, at the model's image size."""
    source, size = loaded.images, loaded.image_size
    assert source is not None
    assert size is not None
    batch = loaded.validation_batch or IMAGES_AT_ONCE
    if settings.data is not None:
        changes = {
            "train": settings.data,
            # The digits have no split of their own, so a fraction of them is held out.
            "validation": 0.2 if settings.data == "builtin" else None,
            "revision": None,
        }
        source = source.model_copy(update=changes)
    data = open_images(source, loaded.classes)
    images = data.train if settings.split == "train" else data.validation
    return ImageExamples(
        images,
        source,
        size,
        DataOrigin(data.description, images.identity(), settings.split),
        limit=settings.limit,
        batch=batch,
        device=loaded.device,
        workers=0 if loaded.run is None else count_workers(source.workers, loaded.device),
    )


def _stock(name: str, settings: Settings) -> AnalyzedModel:
    """Load the model `timm:NAME`, pretrained or, with --init, untrained; on the built-in digits unless given --data."""
    check_timm_name(name)

    def open_() -> OpenedModel:
        device = torch.device(pick_device("auto"))
        seed = 0 if settings.init else None
        loaded = open_timm(name, device, seed=seed)
        digits = replace(settings, data=settings.data or "builtin")
        return OpenedModel(anatomy_of(loaded.module), _images(loaded, digits))

    weights = "untrained" if settings.init else "pretrained"
    return AnalyzedModel(name.removeprefix(TIMM), weights, None, None, "classification", STOCK_GIVES, open_)
