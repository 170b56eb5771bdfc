"""Run directories made by hand: recipes of real objectives with numbers that the tests choose."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from support import ROOT

from lapcli.recipe import load_recipe, recipe_to_dict, recipe_to_yaml
from lapcli.recipe.chat import stage_recipe
from lapcli.recipe.schema import InitFrom
from lapcli.report import paper


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


LOCKS: list[FileLock] = []


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
    (path / "run.json").write_text(json.dumps({**info, "format": 3, "recipe": recipe_to_dict(loaded)}))
    if status == "running":  # by this process, until it ends
        LOCKS.append(FileLock(path / ".lock"))
        LOCKS[-1].acquire()
    losses = curve if curve is not None else [2.0, 1.5, 1.2, 1.1]
    lines = [{"step": 25 * (number + 1), "loss": loss, "lr": 0.1} for number, loss in enumerate(losses)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status == "finished":
        (path / "summary.json").write_text(json.dumps({"end": {"validation_loss": 1.0}}))
        (path / "checkpoints" / "step-000100").mkdir(parents=True)
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

    def stage(which, before):
        given = InitFrom(source=f"run:{before}", sha256=weights_of(before))
        return stage_recipe(chat, which, model.model, model.tokenizer, given)

    write_directory(runs, f"{name}-midtrain", stage("midtrain", name), None)
    return write_directory(runs, f"{name}-sft", stage("sft", f"{name}-midtrain"), scores)


def write_analysis(
    folder: Path,
    what: str,
    runs: dict[str, tuple[int, int, list[dict[str, Any]]]],
    settings: dict[str, Any] | None = None,
    **told: Any,
) -> None:
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
            **told,
            "layers": found,
        }
        for name, (heads, layers, found) in runs.items()
    ]
    (folder / f"{what}.json").write_text(
        json.dumps({"what": what, "definition": "by hand", "settings": settings or {}, "runs": entries})
    )


RECIPES = {"CIFAR10": "vitb_cifar10", "CIFAR100": "vitb_cifar100", "ImageNet": "vitb_imagenet"}
#: Where the paper's ImageNet row must come from: it is not monotone there.
DROP_PATHS = {"CIFAR10": "0.1", "CIFAR100": "0.1", "ImageNet": "0.4"}
SEEDS = (0, 1)


def write_paper(runs: Path) -> None:
    """The paper's numbers, and measurements such that its claims hold.

    Two seeds, a deviation (ddof 0) to either side of each mean.
    """

    def value(numbers, heads, seed):
        mean, deviation = numbers[heads]
        return (mean + (1 - 2 * seed) * (deviation or 0.0)) / 100

    found = {what: {} for what in ("anova", "spectrum", "cossim", "snr", "collapse")}

    def analyse(name, heads, of, layers, seed):
        share = heads / of
        between, within = 0.15 + 0.15 * share**2, 0.4 - 0.08 * share
        sequence = {} if of == 10 else {"within_sequence_share": 1 - between - within}
        shares = {"between_class_share": between, "within_class_share": within, **sequence}
        found["anova"][name] = (heads, layers, [{"layer": layers - 1, **shares}])
        # A spectrum of 200 ranks: the tail falls as heads are replaced; of DINO the head grows too.
        larger = 1.0 if of == 10 else 1 + 0.3 * share
        values = [larger * 100 / (rank + 1) ** (1 + 0.3 * share * (rank > 99)) for rank in range(200)]
        components = 547.7 + (430.4 - 547.7) * heads / of
        found["spectrum"][name] = (
            heads,
            layers,
            [{"layer": layers - 1, "k_0.99": components, "eigenvalue_mean": values}],
        )
        depth = [(layer, (layer + 1) / layers) for layer in range(layers)]
        found["cossim"][name] = (
            heads,
            layers,
            [{"layer": n, "cosine_similarity": 0.3 + 0.4 * share * d} for n, d in depth],
        )
        found["snr"][name] = (heads, layers, [{"layer": n, "snr": 2 + share * d} for n, d in depth])
        near = {
            f"nc2_{a}_{b}": 0.5 - 0.2 * share for a in ("equinorm", "equiangular") for b in ("centred", "classifier")
        }
        found["collapse"][name] = (
            heads,
            layers,
            [{"layer": layers - 1, **near, "nc3": 1 - share / 2, "nc4": 0.3 - share / 9}],
        )

    for data_set, numbers in paper.CLASSIFICATION.items():
        for heads in numbers:
            for seed in SEEDS:
                name = f"{data_set}_{heads}L_{seed}"
                change = [f"model.drop_path={DROP_PATHS[data_set]}"]
                scores = {"top1": value(numbers, heads, seed)}
                write_run(runs, name, RECIPES[data_set], heads=heads, seed=seed, change=change, scores=scores)
                analyse(name, heads, 12, 12, seed)
        for rate in {"0.1", "0.3", "0.4"} - {DROP_PATHS[data_set]}:  # with worse baselines, where k helps
            for heads in numbers:
                name, scores = f"{data_set}_dp{rate}_{heads}L", {"top1": 0.7 + heads / 1000}
                change = [f"model.drop_path={rate}"]
                write_run(runs, name, RECIPES[data_set], heads=heads, change=change, scores=scores)
    for heads in paper.LANGUAGE_AVERAGE:
        for seed in SEEDS:
            scores = {task: value(numbers, heads, seed) for task, numbers in paper.LANGUAGE.items()}
            write_chat_run(runs, f"gpt_{heads}L_{seed}", heads=heads, seed=seed, scores=scores)
            analyse(f"gpt_{heads}L_{seed}", heads, 10, 20, seed)
    for heads in paper.SELF_SUPERVISED["linear"]:
        scores = {task: value(numbers, heads, 0) for task, numbers in paper.SELF_SUPERVISED.items()}
        write_run(runs, f"dino_{heads}L", "dino_vits", heads=heads, scores=scores)
        analyse(f"dino_{heads}L", heads, 6, 12, 0)
    for what, entries in found.items():
        write_analysis(runs / "analysis", what, entries)
