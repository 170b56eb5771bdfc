"""The parameter groups of a student: rates by depth, decay by kind, backbone and heads clipped each by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lapcli.models.self_supervised import StudentTeacher
from lapcli.objectives.dino.rates import (
    backbone_multiplier,
    is_decayed,
    peak_rate,
    prototypes_are_frozen,
    weight_decay,
)
from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.self_supervised import SelfSupervisedRecipe


def parameter_groups(recipe: SelfSupervisedRecipe, model: StudentTeacher) -> list[ParameterGroup]:
    """One for each part (block, head, ...), with and without decay; prototypes by themselves, as they start frozen."""
    found: dict[str, dict[str, Tensor]] = {}
    facts: dict[str, tuple[float, bool, bool, str]] = {}
    for full, parameter in model.trained():
        part, _, name = full.removeprefix("student.").partition(".")
        multiplier = _multiplier(recipe, part, name)
        decayed, prototypes = is_decayed(name), name.startswith("prototypes.")
        group = f"{part}{' prototypes' if prototypes else _block(name)}{'' if decayed else ', no decay'}"
        if part == "backbone" and not _block(name):
            group = f"backbone {name.split('.')[0]}{'' if decayed else ', no decay'}"
        found.setdefault(group, {})[full] = parameter
        facts[group] = multiplier, decayed, prototypes, part
    return [_group(recipe, name, parameters, *facts[name]) for name, parameters in found.items()]


def _multiplier(recipe: SelfSupervisedRecipe, part: str, name: str) -> float:
    if part != "backbone":
        return 1.0
    settings = recipe.optimizer
    return backbone_multiplier(name, recipe.model.layers, settings.layer_decay, settings.patch_embed_lr)


def _block(name: str) -> str:
    return f" block {name.split('.')[1]}" if name.startswith("blocks.") else ""


def _group(
    recipe: SelfSupervisedRecipe,
    name: str,
    parameters: dict[str, Tensor],
    multiplier: float,
    decayed: bool,
    prototypes: bool,
    part: str,
) -> ParameterGroup:
    settings = recipe.optimizer
    options: dict[str, Any] = {"betas": tuple(settings.betas), "eps": settings.eps, "weight_decay": 0.0}
    at_step: Callable[[int], dict[str, float]] = partial(_at_step, recipe, decayed, prototypes)
    return ParameterGroup(
        name, "adamw", peak_rate(recipe) * multiplier, parameters, options, at_step=at_step, clipped_with=part
    )


def _at_step(recipe: SelfSupervisedRecipe, decayed: bool, prototypes: bool, step: int) -> dict[str, float]:
    schedule, start = recipe.schedule, recipe.optimizer.weight_decay
    changed = {"weight_decay": weight_decay(schedule, start, step, recipe.steps)} if decayed else {}
    if prototypes and prototypes_are_frozen(schedule, step):
        changed["lr"] = 0.0
    return changed
