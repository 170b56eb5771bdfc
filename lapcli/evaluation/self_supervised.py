"""Probes of a self-supervised run: the features of its teacher."""

from lapcli.errors import UsageError
from lapcli.evaluation.backbones import DinoBackbone
from lapcli.evaluation.probes import measure_probes, read_settings
from lapcli.evaluation.tasks import Measured, Request
from lapcli.models.self_supervised import load_teacher
from lapcli.objectives.classification import count_workers
from lapcli.recipe.self_supervised import SelfSupervisedRecipe


def evaluate(request: Request) -> Measured:
    recipe, world = request.run.recipe, request.world
    if not isinstance(recipe, SelfSupervisedRecipe):
        raise UsageError(f"{request.run.path} is not a self-supervised run")
    settings = read_settings(request.tasks, request.options, request.data)
    backbone = DinoBackbone(
        load_teacher(request.checkpoint.weights, recipe.model),
        name=f"the teacher of {request.run.path}",
        width=recipe.model.width,
        patch=recipe.model.patch,
        image=recipe.data.crops.global_size,
        mean=recipe.data.mean,
        std=recipe.data.std,
        has_class_token=True,
        device=world.device,
    )
    return measure_probes(
        backbone,
        request.tasks,
        settings,
        recipe.data,
        world,
        batch=request.batch or recipe.validation.batch or recipe.train.micro_batch,
        workers=count_workers(recipe.data.workers, world.device),
        limit=request.limit,
    )
