"""Probes of a self-supervised run: the features of its teacher."""

from lapcli.evaluation.backbones import DinoBackbone
from lapcli.evaluation.probes import measure_probes, read_settings
from lapcli.evaluation.tasks import Measured, Request
from lapcli.kinds.opening import open_run
from lapcli.objectives.classification import worker_count
from lapcli.recipe.self_supervised import SelfSupervisedRecipe
from lapcli.runtime.errors import UsageError


def evaluate(request: Request) -> Measured:
    recipe, world = request.run.recipe, request.world
    if not isinstance(recipe, SelfSupervisedRecipe):
        raise UsageError(f"{request.run.path} is not a self-supervised run")
    settings = read_settings(request.tasks, request.options, request.data)
    backbone = DinoBackbone(
        open_run(request.run, request.checkpoint, world.device).module,
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
        workers=worker_count(recipe, world.device),
        limit=request.limit,
    )
