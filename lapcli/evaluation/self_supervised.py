"""Probes of a self-supervised run: the features of its teacher."""

from pathlib import Path

import torch

from lapcli.evaluation.backbones import DinoBackbone
from lapcli.evaluation.probes import measure_probes, read_settings
from lapcli.evaluation.tasks import Measured, Request
from lapcli.models.dino_vit import DinoViT
from lapcli.models.self_supervised import StudentTeacher
from lapcli.objectives.classification import worker_count
from lapcli.recipe.self_supervised import DinoModel, SelfSupervisedRecipe
from lapcli.runtime.errors import UsageError
from lapcli.training.checkpoint import load_weights


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
        workers=worker_count(recipe, world.device),
        limit=request.limit,
    )


def load_teacher(weights: Path, section: DinoModel) -> DinoViT:
    """The teacher's backbone of a run's weights; nothing is drawn only to be overwritten."""
    with torch.device("meta"):
        model = StudentTeacher(section)
    model.to_empty(device="cpu")
    load_weights(weights, model, str(section.head_plan()))
    return model.teacher.backbone
