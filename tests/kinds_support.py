"""Every kind of training, tiny, as an objective without a run around it."""

from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("language_model", "packed_chat", "padded_chat", "classification", "self_supervised")

# Three layers with none, one and two Laplacian heads, and nothing that is drawn by rank.
MODEL: dict[str, Any] = {"layers": 3, "laplacian_heads": "linear(0, 2)"}


def build_kind(kind: str, folder: Path, world: Any = None, **train: Any) -> Any:
    """The objective; keys of `train` are the recipe's. Weights are drawn, so that every head and layer matters."""
    import torch

    from lapcli.runtime.ranks import World

    world = world or World(0, 1, torch.device("cpu"))
    objective = _BUILDERS[kind](kind, folder, world, {"threads": 1, **train})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in sorted(objective.model.named_parameters()):
            if not name.startswith("teacher.") and p.device.type != "meta":
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    if hasattr(objective.model, "update_teacher"):
        objective.model.update_teacher(0.0)
    return objective


def _text(folder: Path, train: dict[str, Any]) -> tuple[Any, Any]:
    from support import tiny_recipe, write_text

    path = folder / "text.txt"
    recipe = tiny_recipe(
        path if path.exists() else write_text(path),
        model=MODEL,
        train=train,
        validation={"tokens": 7 * 32},  # one sequence short of two batches of four
    )
    return recipe, _tokens(path)


@cache
def _tokens(path: Path) -> Any:
    from support import tiny_recipe

    from lapcli.data.text.tokens import prepare_text

    recipe = tiny_recipe(path)
    return prepare_text(recipe.data, recipe.tokenizer)


def _language_model(kind: str, folder: Path, world: Any, train: dict[str, Any]) -> Any:
    from lapcli.objectives.language_model import LanguageModel

    recipe, data = _text(folder, train)
    return LanguageModel(recipe, data, world)


def _chat(kind: str, folder: Path, world: Any, train: dict[str, Any]) -> Any:
    from support import tiny_chat_recipe

    from lapcli.objectives.chat import Chat, prepare_chat
    from lapcli.recipe.chat import stage_recipe

    base, data = _text(folder, {})
    stage: Any = "midtrain" if kind == "packed_chat" else "sft"
    stages = tiny_chat_recipe(folder, **{stage: {"train": train, "validation": {"rows": 7, "tokens": 7 * 32}}})
    recipe = stage_recipe(stages, stage, base, "run", "0" * 64)
    return Chat(recipe, prepare_chat(recipe, data.tokenizer), world)


def _classification(kind: str, folder: Path, world: Any, train: dict[str, Any]) -> Any:
    from image_support import image_recipe

    from lapcli.data.images.sources import open_images
    from lapcli.objectives.classification import Classification

    recipe = image_recipe(model={**MODEL, "drop_path": 0.0}, train=train, validation={"batch": 100})
    return Classification(recipe, open_images(recipe.data, recipe.model.classes), world)


def _self_supervised(kind: str, folder: Path, world: Any, train: dict[str, Any]) -> Any:
    from dino_support import _photographs, dino_recipe

    from lapcli.objectives.self_supervised import SelfSupervised

    recipe = dino_recipe(model={**MODEL, "drop_path": 0.0}, train=train, validation={"batch": 16})
    return SelfSupervised(recipe, _photographs(), world)


_BUILDERS = {
    "language_model": _language_model,
    "packed_chat": _chat,
    "padded_chat": _chat,
    "classification": _classification,
    "self_supervised": _self_supervised,
}
