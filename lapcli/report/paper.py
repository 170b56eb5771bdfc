"""The paper's own numbers, as printed, and which of our runs stand for which of its experiments.

Table 1: top-1 in % with its deviation over three seeds. Table 2: accuracies in % (pass@10 for GSM8K and HumanEval).
What its ± is, the paper does not say: standard errors of three seeds for the baseline and of two for the other rows
fit, half a difference of two seeds does not fit the baseline. Table 3: one number each, no deviation.
Text: the components for 99% of the variance of a language model's tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from lapcli.report.collect import RunResult
from lapcli.report.grouping import flatten

Numbers = dict[int, tuple[float, float | None]]  # by Laplacian heads: mean and deviation

CLASSIFICATION: dict[str, Numbers] = {
    "CIFAR10": {
        0: (95.35, 0.16),
        3: (95.38, 0.17),
        6: (95.36, 0.10),
        9: (95.76, 0.30),
        11: (95.88, 0.14),
        12: (95.86, 0.10),
    },
    "CIFAR100": {
        0: (75.12, 0.46),
        3: (75.81, 0.14),
        6: (76.39, 0.26),
        9: (76.80, 0.39),
        11: (76.83, 0.26),
        12: (77.04, 0.40),
    },
    "ImageNet": {
        0: (81.45, 0.08),
        3: (82.73, 0.19),
        6: (82.70, 0.02),
        9: (82.47, 0.08),
        11: (82.40, 0.12),
        12: (82.32, 0.07),
    },
}
LANGUAGE: dict[str, Numbers] = {
    "arc_easy": {
        0: (31.03, 4.29),
        1: (40.20, 3.66),
        3: (42.80, 0.55),
        5: (47.12, 1.66),
        7: (44.63, 0.27),
        9: (46.50, 0.04),
        10: (46.41, 0.27),
    },
    "arc_challenge": {
        0: (26.36, 1.29),
        1: (29.14, 1.15),
        3: (29.65, 0.04),
        5: (34.22, 0.86),
        7: (32.26, 0.60),
        9: (32.21, 0.21),
        10: (31.52, 0.55),
    },
    "mmlu": {
        0: (28.39, 1.51),
        1: (32.13, 0.87),
        3: (33.23, 0.01),
        5: (33.22, 0.04),
        7: (33.22, 0.23),
        9: (33.71, 0.15),
        10: (33.16, 0.16),
    },
    "gsm8k": {
        0: (22.29, 0.13),
        1: (21.91, 1.89),
        3: (24.00, 0.27),
        5: (23.24, 1.63),
        7: (22.14, 0.15),
        9: (23.39, 0.34),
        10: (23.73, 0.61),
    },
    "humaneval": {
        0: (11.59, 0.70),
        1: (11.59, 1.22),
        3: (13.11, 0.91),
        5: (12.50, 0.30),
        7: (12.80, 1.82),
        9: (14.63, 0.00),
        10: (11.89, 0.91),
    },
}
LANGUAGE_AVERAGE: Numbers = {
    0: (23.93, None),
    1: (26.99, None),
    3: (28.56, None),
    5: (30.06, None),
    7: (29.01, None),
    9: (30.09, None),
    10: (29.34, None),
}
RANDOM = {"arc_easy": 25.0, "arc_challenge": 25.0, "mmlu": 25.0, "gsm8k": 0.0, "humaneval": 0.0}
SELF_SUPERVISED: dict[str, Numbers] = {
    "linear": {0: (71.55, None), 1: (72.07, None), 3: (72.98, None), 5: (72.98, None), 6: (72.30, None)},
    "ade20k": {0: (29.81, None), 1: (30.73, None), 3: (31.70, None), 5: (32.27, None), 6: (29.64, None)},
}
#: `k_0.99` of the language models' tokens: none and all ten heads Laplacian.
COMPONENTS: Numbers = {0: (547.7, None), 10: (430.4, None)}

_DATA_SETS = {
    "CIFAR10": (re.compile(r"cifar-?10(?!0)", re.IGNORECASE), 10, {"airplane", "frog"}),
    "CIFAR100": (re.compile(r"cifar-?100", re.IGNORECASE), 100, {"aquarium_fish", "willow_tree"}),
    "ImageNet": (re.compile(r"imagenet", re.IGNORECASE), 1000, {"n01440764"}),
}


def data_set_of(run: RunResult) -> str | None:
    """CIFAR10, CIFAR100 or ImageNet: by the name of the source, or by the names of the classes."""
    source = str((run.recipe.get("data") or {}).get("train", ""))
    classes = run.info.get("classes")
    names = {str(name) for name in classes} if isinstance(classes, list) else set()
    count = len(names) or (run.recipe.get("model") or {}).get("classes")
    for name, (pattern, size, some) in _DATA_SETS.items():
        if count in (size, None) and (pattern.search(source) or some <= names):
            return name
    return None


#: Keys that say where data lies and how a machine works through it; they change no number but by rounding. Which images
#: `data.train` has is known by `data_set_of`, which text by its name.
_TECHNICAL = re.compile(
    r"(start\.)*(model\.laplacian_heads|data\.(train|revision|files|image_column|label_column|workers|"
    r"decoded_gigabytes)|train\.(micro_batch|device|threads|compile|deterministic|steps|epochs)|checkpoint\..*|"
    r"validation(\..*)?|tokenizer\.file)"
)
_LENGTH = ("train.steps", "train.epochs")
DROP_PATHS = (0.1, 0.3, 0.4)  # of the paper's image classifiers
_TEXT = re.compile(r"fineweb[-_ ]?edu", re.IGNORECASE)


def value_in_words(value: Any) -> str:
    """As it would stand in a recipe, more or less."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def recipe_differences(run: RunResult) -> list[tuple[str, Any, Any]] | None:
    """(key, the paper's, the run's) against the recipe of the paper for that experiment; none if there is no such.

    Laplacian heads and the three drop paths are the paper's grid. Where data lies, micro-batches, workers, devices,
    validation and checkpoints are left out; the length of training is compared in steps or epochs, whichever is given.
    """
    paper = _paper_recipe(run)
    if paper is None:
        return None
    ours, theirs = dict(flatten(_without_places(run.recipe))), dict(flatten(_without_places(paper)))
    found = list(_text_differences(theirs, ours))
    if run.objective == "classification" and ours.get("model.drop_path") in DROP_PATHS:
        theirs["model.drop_path"] = ours["model.drop_path"]
    for key in dict.fromkeys((*theirs, *ours)):
        own = key
        while own.startswith("start."):
            own = own.removeprefix("start.")
        is_later = own != key and own.startswith(("model.", "tokenizer."))
        if not _TECHNICAL.fullmatch(key) and not is_later and ours.get(key) != theirs.get(key):
            found.append((key, theirs.get(key), ours.get(key)))
    prefixes = {key.removesuffix(_LENGTH[0]) for key in theirs if key.endswith(_LENGTH[0])}
    for prefix in sorted(prefixes):
        papers, own_length = _length(theirs, prefix), _length(ours, prefix)
        if papers != own_length:
            found.append((f"{prefix}train (length)", papers, own_length))
    return found


def _length(leaves: Mapping[str, Any], prefix: str) -> str:
    """Steps win over epochs, as in training."""
    steps, epochs = (leaves.get(prefix + key) for key in _LENGTH)
    return f"{steps} steps" if steps is not None else f"{epochs} epochs"


def _text_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Where a language model, or what it began with, was trained on another text than the paper's FineWeb-Edu.

    A copy is known by its name, or by the paper's shards, which `--data DIR` leaves in the recipe.
    """
    for key, source in theirs.items():
        if not re.fullmatch(r"(start\.)*data\.train", key) or not _TEXT.search(str(source)):
            continue
        files = key.removesuffix("train") + "files"
        if ours.get(files) == theirs.get(files):
            continue
        if not _TEXT.search(str(ours.get(key))):
            yield key, source, ours.get(key)
        elif ours.get(files) is not None:
            yield files, theirs.get(files), ours[files]


def _without_places(value: Any) -> Any:
    """Inside the lists of a chat mixture: each data set by its last name, whether of the hub, an address or a copy."""
    if isinstance(value, dict):
        kept = {key: _without_places(inner) for key, inner in value.items() if key not in ("sha256", "revision")}
        if isinstance(value.get("source"), str):
            kept["source"] = value["source"].rstrip("/").rpartition("/")[2].rpartition(":")[2]
        return kept
    return [_without_places(inner) for inner in value] if isinstance(value, list) else value


def _paper_recipe(run: RunResult) -> dict[str, Any] | None:
    name: str | None = None
    if run.objective == "classification":
        data_set = data_set_of(run)
        name = {"CIFAR10": "vitb_cifar10", "CIFAR100": "vitb_cifar100", "ImageNet": "vitb_imagenet"}.get(data_set or "")
    elif run.objective == "self_supervised" and data_set_of(run) == "ImageNet":
        name = "dino_vits"
    elif run.objective == "language_model":
        name = "gpt561m"
    elif run.objective == "chat":
        return _paper_chat(str(run.recipe.get("stage")))
    return _load(name) if name else None


@cache
def _load(name: str) -> dict[str, Any]:
    from lapcli.recipe import load_recipe, recipe_to_dict
    from lapcli.recipe.loading import shipped_recipes

    recipe = recipe_to_dict(load_recipe(shipped_recipes() / f"{name}.yaml"))
    recipe.pop("seed", None)
    return recipe


@cache
def _paper_chat(stage: str) -> dict[str, Any] | None:
    """A stage's recipe as a run keeps it, on top of the stages before it."""
    from lapcli.recipe import load_recipe, recipe_from_dict, recipe_to_dict
    from lapcli.recipe.chat import ChatRecipe, stage_recipe
    from lapcli.recipe.loading import shipped_recipes
    from lapcli.recipe.schema import LanguageModelRecipe

    pretraining = _load("gpt561m")
    if stage not in ("midtrain", "sft"):
        return None
    chat, model = (
        load_recipe(shipped_recipes() / "chat561m.yaml"),
        recipe_from_dict({**json.loads(json.dumps(pretraining)), "seed": 0}),
    )
    assert isinstance(chat, ChatRecipe)
    assert isinstance(model, LanguageModelRecipe)
    before = pretraining
    for name in ("midtrain", "sft"):
        recipe = recipe_to_dict(stage_recipe(chat, name, model, "-", "0" * 64))
        recipe.pop("seed", None)
        recipe["start"] = before
        if name == stage:
            return recipe
        before = recipe
    return None


def is_papers(run: RunResult) -> bool:
    """Trained by the paper's recipe: nothing but its grid and technical keys differs."""
    return recipe_differences(run) == []
