"""A tiny objective of every kind, without a run."""

import functools
import os
from pathlib import Path
from typing import Any

from support import built

TEXT = ("language_model", "packed_chat", "padded_chat")
OBJECTIVES = (*TEXT, "classification", "self_supervised")

# Three layers with zero, one and two Laplacian heads, and no randomness by rank.
MODEL: dict[str, Any] = {"layers": 3, "laplacian_heads": "linear(0, 2)"}


def build(kind: str, folder: Path, world: Any = None, policy: Any = None, **train: Any) -> Any:
    """The objective; `train` takes recipe keys. Weights are random, so that every head and layer matters."""
    import torch

    from lapcli.runtime.ranks import World

    world = world or World(0, 1, torch.device("cpu"))
    objective = _BUILDERS[kind](kind, folder, world, policy, {"threads": 1, **train})
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


@functools.cache
def _tokens(path: Path) -> Any:
    from support import tiny_recipe

    from lapcli.data.text.tokens import prepare_text

    recipe = tiny_recipe(path)
    return prepare_text(recipe.data, recipe.tokenizer)


def _language_model(kind: str, folder: Path, world: Any, policy: Any, train: dict[str, Any]) -> Any:
    from lapcli.objectives.language_model import LanguageModel

    recipe, data = _text(folder, train)
    return built(LanguageModel, recipe, data, world, policy)


def _chat(kind: str, folder: Path, world: Any, policy: Any, train: dict[str, Any]) -> Any:
    from support import tiny_chat_recipe

    from lapcli.objectives.chat import Chat
    from lapcli.recipe.chat import stage_recipe

    base, data = _text(folder, {})
    stage: Any = "midtrain" if kind == "packed_chat" else "sft"
    stages = tiny_chat_recipe(folder, **{stage: {"train": train, "validation": {"rows": 7, "tokens": 7 * 32}}})
    recipe = stage_recipe(stages, stage, base.model, base.tokenizer, None)
    return built(Chat, recipe, data.tokenizer, world, policy)


def _classification(kind: str, folder: Path, world: Any, policy: Any, train: dict[str, Any]) -> Any:
    from image_support import image_recipe

    from lapcli.data.images.sources import open_images
    from lapcli.objectives.classification import Classification

    recipe = image_recipe(model={**MODEL, "drop_path": 0.0}, train=train, validation={"batch": 100})
    return built(Classification, recipe, open_images(recipe.data, recipe.model.classes), world, policy)


def _self_supervised(kind: str, folder: Path, world: Any, policy: Any, train: dict[str, Any]) -> Any:
    from dino_support import _photographs, dino_recipe

    from lapcli.objectives.self_supervised import SelfSupervised

    recipe = dino_recipe(model={**MODEL, "drop_path": 0.0}, train=train, validation={"batch": 16})
    return built(SelfSupervised, recipe, _photographs(), world, policy)


_BUILDERS = {
    "language_model": _language_model,
    "packed_chat": _chat,
    "padded_chat": _chat,
    "classification": _classification,
    "self_supervised": _self_supervised,
}


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"precision": "float32", "compile": False, "batch": 16},
    "bf16": {"precision": "bf16", "compile": False, "batch": 8},
    "compile": {"precision": "float32", "compile": True, "batch": 8},
}
COMBINATIONS = [(kind, name) for kind in OBJECTIVES for name in ("accumulation", "bf16")]
COMBINATIONS.append(("language_model", "compile"))
UPDATES = 3


def updates_of_a_rank(rank: int, size: int, folder: str, result: str, cache: str) -> None:
    """Three updates of every combination, on one rank of `size` processes; a micro-step has 8 examples in all.

    It saves losses, gradient norms, a hash of the final weights and, for the last update, the counts of
    all-reduces, host syncs and compiled graphs (Dynamo and AOTAutograd only). Then the last rank's loss is set to NaN.
    """
    import contextlib
    import hashlib
    import io
    import json

    import torch
    import torch._dynamo
    import torch.distributed as dist
    from counting_support import HostWaits
    from torch.distributed.tensor import DTensor

    from lapcli.runs import Run
    from lapcli.runtime.errors import Diverged
    from lapcli.runtime.progress import LogConsole
    from lapcli.runtime.ranks import World
    from lapcli.training import loop as loop_module

    os.environ["LAP_CACHE"] = cache
    all_reduce, sums = dist.all_reduce, []
    compile_, aot_eager, graphs = torch.compile, torch._dynamo.lookup_backend("aot_eager"), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def counted(*given: Any, **options: Any) -> Any:
        sums.append(given)
        return all_reduce(*given, **options)

    def weights_of(model: Any) -> str:
        weights = hashlib.sha256()
        for parameter in model.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            weights.update(whole.detach().flatten().view(torch.uint8).numpy().tobytes())
        return weights.hexdigest()

    dist.all_reduce = counted
    torch.compile = lambda *given, **options: compile_(*given, **options, backend=backend)  # type: ignore
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    world, found = World(rank, size, torch.device("cpu")), {}
    for kind, name in COMBINATIONS:
        option = OPTIONS[name]
        objective = build(kind, Path(folder), world, **option, micro_batch=8 // size)
        assert objective.batches.accumulation == option["batch"] // 8
        run = Run(Path(folder) / "run", objective.recipe, {})
        loop = loop_module.Loop(objective, objective.recipe, run, world, LogConsole(io.StringIO()))
        lines = [loop._update(step) for step in range(UPDATES - 1)]
        sums.clear()
        counts_waits = name != "compile" and kind in TEXT  # the host reads images with the same operations
        with HostWaits(world.device) if counts_waits else contextlib.nullcontext([]) as waits:
            lines.append(loop._update(UPDATES - 1))
        found[f"{kind} {name}"] = {
            "losses": [line["loss"] for line in lines],
            "norms": [line["gradient_norm"] for line in lines],
            "weights": weights_of(objective.model),
            "sums": len(sums),
            "waits": len(waits),
            "graphs": len(graphs),
            "blocks": len(objective.blocks()),
        }
        graphs.clear()
        if (kind, name) == ("language_model", "accumulation"):
            before = weights_of(objective.model)
            loop.module.register_forward_hook(lambda *given: given[-1] * (float("nan") if rank == size - 1 else 1))
            try:
                loop._update(UPDATES)
            except Diverged as error:
                found["not finite"] = {"error": str(error), "unchanged": weights_of(objective.model) == before}
    Path(result).write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()
