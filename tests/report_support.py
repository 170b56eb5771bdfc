"""Run directories made by hand: recipes of real objectives with numbers that the tests choose."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from support import ROOT

from lapcli.recipe import load_recipe, recipe_to_dict, recipe_to_yaml
from lapcli.recipe.chat import stage_recipe


def write_run(
    runs: Path,
    name: str,
    recipe: str = "vit_digits",
    *,
    heads: Any = 0,
    seed: int = 0,
    change: list[str] | None = None,
    scores: dict[str, float] | None = None,
    status: str = "finished",
    curve: list[float] | None = None,
    **evaluation: Any,
) -> Path:
    """A run of `recipes/<recipe>.yaml` with some keys changed; `scores` are what `lap eval` left, as shares."""
    settings = [f"model.laplacian_heads={json.dumps(heads)}", *(change or [])]
    loaded = _recipe(recipe, tuple(settings)).model_copy(update={"seed": seed})
    return write_directory(runs, name, loaded, scores, status=status, curve=curve, **evaluation)


@cache
def _recipe(name: str, settings: tuple[str, ...] = ()) -> Any:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", list(settings))


def write_directory(
    runs: Path,
    name: str,
    loaded: Any,
    scores: dict[str, float] | None,
    *,
    status: str = "finished",
    curve=None,
    **evaluation,
) -> Path:
    path = runs / name
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(recipe_to_yaml(loaded))
    info = {
        "name": name,
        "objective": loaded.objective,
        "status": status,
        "step": 100 if status == "finished" else 40,
        "steps": 100,
        "seed": loaded.seed,
        "versions": {"lap": "0.1.0", "torch": "2.15.0"},
        "device": "1 x cpu",
        "data": "hand-made",
        "data_sha256": hashlib.sha256(json.dumps(recipe_to_dict(loaded).get("data"), default=str).encode()).hexdigest(),
        "weights_sha256": weights_of(name),
        "updated": "2026-01-01T00:00:00+0000",
    }
    (path / "run.json").write_text(json.dumps(info))
    losses = curve if curve is not None else [2.0, 1.5, 1.2, 1.1]
    lines = [{"step": 25 * (number + 1), "loss": loss, "lr": 0.1} for number, loss in enumerate(losses)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status == "finished":
        (path / "summary.json").write_text(json.dumps({"end": {"validation_loss": 1.0}}))
    if scores is not None:
        write_evaluation(path, scores, **evaluation)
    return path


def weights_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def write_evaluation(path: Path, scores: dict[str, float], file: str = "step-000100_all.json", **told: Any) -> None:
    info = json.loads((path / "run.json").read_text())
    is_chat = info["objective"] == "chat"
    tasks = {}
    for task, value in scores.items():
        details: dict[str, Any] = {}
        if task in ("gsm8k", "humaneval"):
            details = {
                "metric": "pass@10",
                "sampling": {"samples": 10, "temperature": 1.0, "top_k": 50, "max_new_tokens": 512},
            }
        tasks[task] = {"task": task, "value": value, "count": 1000, "interval": [0, 1], "details": details}
    record = {
        "run": info["name"],
        "objective": info["objective"],
        "step": 100,
        "weights_sha256": info["weights_sha256"],
        "data": info["data"],
        "limit": None,
        **({"protocol": "paper"} if is_chat else {}),
        **told,
        "tasks": tasks,
    }
    (path / "eval").mkdir(exist_ok=True)
    (path / "eval" / file).write_text(json.dumps(record))


def write_chat_run(runs: Path, name: str, *, heads: int, seed: int, scores: dict[str, float] | None) -> Path:
    """The paper's pretraining, mid-training and fine-tuning, three runs; only the last has scores."""
    chat = _recipe("chat561m")
    write_run(runs, name, "gpt561m", heads=heads, seed=seed)
    model = _recipe("gpt561m", (f"model.laplacian_heads={heads}",)).model_copy(update={"seed": seed})
    write_directory(runs, f"{name}-midtrain", stage_recipe(chat, "midtrain", model, name, weights_of(name)), None)
    last = stage_recipe(chat, "sft", model, f"{name}-midtrain", weights_of(f"{name}-midtrain"))
    return write_directory(runs, f"{name}-sft", last, scores)


def write_analysis(folder: Path, what: str, runs: dict[str, tuple[int, int, list[dict[str, Any]]]]) -> None:
    """`runs`: name to (Laplacian heads, layers of the model, what was found in each measured layer)."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        {
            "name": name,
            "laplacian_heads": [heads] * layers,
            "heads": 12,
            "weights": "trained",
            "step": 100,
            "weights_sha256": weights_of(name),
            "sequences": 64,
            "layers": found,
        }
        for name, (heads, layers, found) in runs.items()
    ]
    (folder / f"{what}.json").write_text(
        json.dumps({"what": what, "definition": "by hand", "settings": {}, "runs": entries})
    )
