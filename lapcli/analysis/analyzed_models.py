"""The models that are analysed: those of runs, the same models untrained, and stock timm models, each with its data."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lapcli.analysis.examples import Examples, ImageExamples, Origin, TextExamples
from lapcli.analysis.measurement import CLASSIFIER, HEADS, IMAGES, LABELS
from lapcli.analysis.selection import Selection
from lapcli.data.cache import digest
from lapcli.evaluation.run_tasks import find_weights
from lapcli.heads.plan import HeadPlan
from lapcli.kinds.chat import folder_of
from lapcli.models.anatomy import Anatomy, anatomy_of
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.schema import GPTRecipe
from lapcli.recipe.self_supervised import SelfSupervisedRecipe
from lapcli.recipe.vision import ClassificationRecipe, ImageFiles
from lapcli.runs import TOKENIZER, Run, read_run
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.ranks import pick_device
from lapcli.training.checkpoint import load_weights

SEQUENCES = 512  # of text, where --limit does not say
IMAGES_AT_ONCE = 64


@dataclass(frozen=True)
class ModelKind:
    """What a kind of model on its data offers to measurements."""

    name: str
    offers: frozenset[str]
    label: str = "class"  # what a label of an example or a token is


LANGUAGE = ModelKind("language", frozenset({LABELS, HEADS}), "next token")
SELF_SUPERVISED = ModelKind("self-supervised images", frozenset({LABELS, HEADS, IMAGES}))
CLASSIFICATION = ModelKind("image classification", frozenset({LABELS, HEADS, IMAGES, CLASSIFIER}))


@dataclass(frozen=True)
class AnalyzedModel:
    """A model that is built, loaded and given its data when `open` is called, so that one at a time is in memory."""

    name: str
    weights: str  # trained, untrained, pretrained
    step: int | None
    weights_sha256: str | None
    kind: ModelKind
    open: Callable[[], "OpenedModel"]
    path: Path | None = None  # of the run


def results_folder(models: Sequence[AnalyzedModel], runs_dir: Path) -> Path:
    """In the run, or for several runs a folder with their names, so that no comparison overwrites another."""
    paths = {model.path for model in models}
    alone = paths.pop() if len(paths) == 1 else None
    if alone is not None:
        return alone / "analysis"
    names = sorted({re.sub(r"[^\w.+-]", "_", model.name) for model in models})
    joined = "+".join(names)
    if len(joined) > 120:
        joined = f"{names[0][:60]}+{len(names) - 1}-more-{digest(*names)[:6]}"
    return runs_dir / "analysis" / joined


@dataclass(frozen=True)
class OpenedModel:
    anatomy: Anatomy
    examples: Examples

    @property
    def plan(self) -> HeadPlan:
        return self.anatomy.plan


def find_models(selection: Selection, runs: Sequence[Run]) -> list[AnalyzedModel]:
    """The models of the runs in their order, then the stock models."""
    models: list[AnalyzedModel] = []
    for run in runs:
        models.append(_model_of_run(run, selection, trained=True))
        if selection.init:
            models.append(_model_of_run(run, selection, trained=False))
    models += [_stock(name, selection) for name in selection.models]
    if len({IMAGES in model.kind.offers for model in models}) > 1:
        raise UsageError("language models and image models cannot be compared in one figure; name runs of one kind")
    return models


def _model_of_run(run: Run, selection: Selection, trained: bool) -> AnalyzedModel:
    recipe = run.recipe
    if isinstance(recipe, GPTRecipe):
        kind, opener = LANGUAGE, _open_language
    elif isinstance(recipe, ClassificationRecipe):
        kind, opener = CLASSIFICATION, _open_classification
    elif isinstance(recipe, SelfSupervisedRecipe):
        kind, opener = SELF_SUPERVISED, _open_self_supervised
    else:
        raise UsageError(f"{run.path} is a run of {recipe.objective}, which cannot be analysed; use --run")
    if not trained:
        return AnalyzedModel(run.name, "untrained", 0, None, kind, lambda: opener(run, None, selection), run.path)
    weights = find_weights(run, selection.checkpoint)
    return AnalyzedModel(
        run.name,
        "trained",
        weights.step,
        weights.weights_sha256,
        kind,
        lambda: opener(run, weights.weights, selection),
        run.path,
    )


def _open_language(run: Run, weights: Path | None, selection: Selection) -> OpenedModel:
    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.data.text.tokens import prepare_text
    from lapcli.objectives.language_model import build_gpt
    from lapcli.runtime.progress import shown_progress

    recipe, base = run.recipe, _pretrained(run)
    assert isinstance(recipe, GPTRecipe)
    device = torch.device(pick_device(recipe.train.device))
    # In float32 whatever it was trained in: the measurements are of the weights, not of bf16's rounding.
    plain = recipe.train.model_copy(update={"compile": False, "precision": "float32"})
    model = build_gpt(recipe.model_copy(update={"train": plain}), device)
    if weights is not None:
        load_weights(weights, model, str(model.config.head_plan))
    source, own = base.recipe.data, base.path / TOKENIZER  # type: ignore[attr-defined]
    if selection.data is not None:
        changes = {"train": selection.data, "files": None, "revision": None, "validation": None}
        source = source.model_copy(update=changes)
    tokenizer = Tokenizer.from_file(own)
    base.check_tokenizer(tokenizer.sha256)
    section = recipe.tokenizer.model_copy(update={"file": str(own)})
    with shown_progress() as progress:
        data = prepare_text(source, section, progress=progress)
    if selection.data is None and base.info.get("data_sha256") not in (None, data.identity):
        raise DataError(f"the text of {base.path} has changed since it was trained; name the text with --data")
    stream = data.train if selection.split == "train" else data.validation
    examples = TextExamples(
        stream,
        tokenizer,
        Origin(data.description, data.identity, selection.split),
        context=recipe.model.context,
        limit=selection.limit or SEQUENCES,
        batch=selection.batch,
        device=device,
    )
    return OpenedModel(anatomy_of(model), examples)


def _pretrained(run: Run) -> Run:
    """The run whose text the model was pretrained on: a chat stage is measured on the same."""
    while isinstance(run.recipe, ChatStageRecipe):
        run = read_run(folder_of(run.recipe.start.run, run.path.parent))
    return run


def _open_classification(run: Run, weights: Path | None, selection: Selection) -> OpenedModel:
    from lapcli.models.vit import build_vit
    from lapcli.objectives.classification import worker_count

    recipe = run.recipe
    assert isinstance(recipe, ClassificationRecipe)
    device = torch.device(pick_device(recipe.train.device))
    model = build_vit(recipe.model, recipe.seed)
    if weights is not None:
        load_weights(weights, model, str(recipe.model.head_plan()))
    batch = selection.batch or recipe.validation.batch or IMAGES_AT_ONCE
    workers = worker_count(recipe, device)
    examples = _images(recipe.data, recipe.model.image, recipe.model.classes, selection, batch, device, workers)
    return OpenedModel(anatomy_of(model.to(device)), examples)


def _open_self_supervised(run: Run, weights: Path | None, selection: Selection) -> OpenedModel:
    """The teacher's backbone, which is what is evaluated, on whole images of the global crops' size."""
    from lapcli.models.self_supervised import StudentTeacher
    from lapcli.objectives.classification import worker_count

    recipe = run.recipe
    assert isinstance(recipe, SelfSupervisedRecipe)
    device = torch.device(pick_device(recipe.train.device))
    model = StudentTeacher(recipe.model, recipe.seed)
    if weights is not None:
        load_weights(weights, model, str(recipe.model.head_plan()))
    batch = selection.batch or recipe.validation.batch or IMAGES_AT_ONCE
    workers = worker_count(recipe, device)
    examples = _images(recipe.data, recipe.data.crops.global_size, None, selection, batch, device, workers)
    return OpenedModel(anatomy_of(model.teacher.backbone.to(device)), examples)


def _images(
    source: ImageFiles,
    size: int,
    classes: int | None,
    selection: Selection,
    batch: int,
    device: torch.device,
    workers: int,
) -> ImageExamples:
    from lapcli.data.images.sources import open_images

    if selection.data is not None:
        changes = {
            "train": selection.data,
            "validation": 0.2 if selection.data == "builtin" else None,
            "revision": None,
        }
        source = source.model_copy(update=changes)
    data = open_images(source, classes)
    part = data.train if selection.split == "train" else data.validation
    origin = Origin(data.description, part.identity(), selection.split)
    return ImageExamples(
        part,
        source,
        size,
        origin,
        limit=selection.limit,
        seed=selection.seed,
        batch=batch,
        device=device,
        workers=workers,
    )


def _stock(name: str, selection: Selection) -> AnalyzedModel:
    """`timm:NAME` with its pretrained weights, or untrained with --init."""
    prefix, _, model = name.partition(":")
    if prefix != "timm" or not model:
        raise UsageError(f"--model {name[:60]!r}: expected timm:NAME, such as timm:vit_tiny_patch16_224")
    weights = "untrained" if selection.init else "pretrained"
    return AnalyzedModel(model, weights, None, None, CLASSIFICATION, lambda: _open_stock(model, selection))


def _open_stock(name: str, selection: Selection) -> OpenedModel:
    import timm
    from timm.data import resolve_model_data_config

    if not timm.is_model(name.split(".")[0]):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:3]
        hint = f"; there are {', '.join(near)}" if near else ""
        raise UsageError(f"timm has no model {name[:60]!r}{hint}; see timm.list_models()")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(selection.seed)
        try:
            model: Any = timm.create_model(name, pretrained=not selection.init)
        except Exception as error:  # the hub's own, of many kinds: no network, no such weights, no disk
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise DataError(
                f"the weights of timm:{name} cannot be had ({reason}); fetch them where there is a network, "
                "or use --init for untrained ones"
            ) from None
    device = torch.device(pick_device("auto"))
    config = resolve_model_data_config(model)
    source = ImageFiles(
        train="builtin",  # the digits, unless --data says otherwise
        validation=0.2,
        interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        crop_ratio=float(config["crop_pct"]),
        mean=list(config["mean"]),
        std=list(config["std"]),
    )
    size = int(config["input_size"][-1])
    examples = _images(source, size, None, selection, selection.batch or IMAGES_AT_ONCE, device, 0)
    return OpenedModel(anatomy_of(model.to(device)), examples)


def weights_note(model: AnalyzedModel) -> str:
    step = "" if model.step is None else f", step {model.step}"
    sha256 = "" if model.weights_sha256 is None else f", sha256 {model.weights_sha256}"
    return f"{model.path or model.name}: {model.weights} weights{step}{sha256}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
