"""Top-1 and top-5 accuracy of a classification run's weights."""

import contextlib

import torch

from lapcli.data.images import open_images
from lapcli.errors import UsageError
from lapcli.evaluation.accuracy import measure_accuracy
from lapcli.evaluation.tasks import Measured, Request, Score, wilson_interval
from lapcli.models.vit import build_vit
from lapcli.objectives.classification import uses_bf16, worker_count
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.training.checkpoint import load_weights

TOP = {"top1": 1, "top5": 5}


def evaluate(request: Request) -> Measured:
    recipe, world = request.run.recipe, request.world
    if not isinstance(recipe, ClassificationRecipe):
        raise UsageError(f"{request.run.path} is not a classification run")
    if request.data is not None:
        source = recipe.data.model_copy(update={"train": str(request.data), "validation": None, "revision": None})
        recipe = recipe.model_copy(update={"data": source})
    data = open_images(recipe.data, recipe.model.classes)
    model = build_vit(recipe.model)
    load_weights(request.checkpoint.weights, model, str(recipe.model.head_plan()))
    model.to(world.device)
    bf16 = uses_bf16(recipe, world.device)
    with torch.autocast(world.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
        found = measure_accuracy(
            model,
            data.validation,
            recipe,
            world,
            request.batch or recipe.validation.batch or recipe.train.micro_batch,
            workers=worker_count(recipe, world.device),
            limit=request.limit,
        )
    scores = [
        Score(task, found.top(TOP[task]), found.images, wilson_interval(found.correct[TOP[task]], found.images))
        for task in request.tasks
    ]
    return Measured(scores, data.description, data.validation.identity())
