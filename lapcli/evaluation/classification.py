"""A classification run's weights: top-1 and top-5 accuracy, and the probes of its features."""

import contextlib

import numpy as np
import torch
from torch import nn

from lapcli.data.cache import digest
from lapcli.data.images.ade20k import is_ade20k
from lapcli.data.images.image_set import Part
from lapcli.data.images.sources import open_held_out
from lapcli.evaluation.backbones import TimmBackbone
from lapcli.evaluation.features import spread
from lapcli.evaluation.probes import Settings, measure_probes, read_settings
from lapcli.evaluation.tasks import PROBES, Measured, Request, Score, wilson_interval
from lapcli.kinds.opening import open_run
from lapcli.measures.accuracy import measure_accuracy
from lapcli.objectives.classification import worker_count
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.runtime.devices import uses_bf16
from lapcli.runtime.errors import UsageError

TOP = {"top1": 1, "top5": 5}


def evaluate(request: Request) -> Measured:
    recipe, world = request.run.recipe, request.world
    if not isinstance(recipe, ClassificationRecipe):
        raise UsageError(f"{request.run.path} is not a classification run")
    settings = read_settings(request.tasks, request.options, request.data)
    model = open_run(request.run, request.checkpoint, world.device).module
    top = [task for task in request.tasks if task in TOP]
    probes = [task for task in request.tasks if task in PROBES]
    if not probes:
        return _accuracy(request, recipe, model, top)
    probed = _probes(request, recipe, model, probes, settings)
    if not top:
        return probed
    first = _accuracy(request, recipe, model, top)
    return Measured(
        [*first.scores, *probed.scores],
        "; ".join(dict.fromkeys([first.data, *probed.data.split("; ")])),
        digest(first.data_sha256, probed.data_sha256),
        notes=probed.notes,
        variant=probed.variant,
    )


def _accuracy(request: Request, recipe: ClassificationRecipe, model: nn.Module, tasks: list[str]) -> Measured:
    world = request.world
    if request.data is not None and not ("ade20k" in request.tasks and is_ade20k(request.data)):
        source = recipe.data.model_copy(update={"train": str(request.data), "validation": None, "revision": None})
        recipe = recipe.model_copy(update={"data": source})
    numbers = [str(number) for number in range(recipe.model.classes)]
    images, description = open_held_out(recipe.data, request.run.info.get("classes") or numbers)
    identity = images.identity()
    world.require_same({"data": identity})
    positions = spread(len(images), request.limit)
    measured = images if positions is None else Part(images, np.array(positions))
    bf16 = uses_bf16(recipe.train.precision, world.device)
    with torch.autocast(world.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
        found = measure_accuracy(
            model,
            measured,
            recipe,
            world,
            request.batch or recipe.validation.batch or recipe.train.micro_batch,
            workers=worker_count(recipe, world.device),
        )
    scores = [
        Score(task, found.top(TOP[task]), found.images, wilson_interval(found.correct[TOP[task]], found.images))
        for task in tasks
    ]
    return Measured(scores, description, identity)


def _probes(
    request: Request, recipe: ClassificationRecipe, model: nn.Module, tasks: list[str], settings: Settings
) -> Measured:
    name, source = str(request.run.path), recipe.data
    return measure_probes(
        TimmBackbone(model, name=name, mean=source.mean, std=source.std, device=request.world.device),
        tasks,
        settings,
        source,
        request.world,
        batch=request.batch or recipe.validation.batch or recipe.train.micro_batch,
        workers=worker_count(recipe, request.world.device),
        limit=request.limit,
    )
