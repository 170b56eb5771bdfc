"""The paper's own numbers (`paper.yaml`), and which of our runs belong to which of its experiments."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lapcli.recipe import load_recipe, recipe_from_dict, recipe_to_dict
from lapcli.recipe.chat import STAGES, ChatRecipe, stage_recipe
from lapcli.recipe.loading import shipped_recipes
from lapcli.recipe.schema import GPTRecipe
from lapcli.report.collect import RunResult
from lapcli.report.grouping import flatten

Numbers = dict[int, tuple[float, float | None]]  # by Laplacian heads: mean and deviation

_PAPER: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _numbers(values: Mapping[int, Any]) -> Numbers:
    return {heads: tuple(value) if isinstance(value, list) else (value, None) for heads, value in values.items()}


CLASSIFICATION = {data_set: _numbers(values) for data_set, values in _PAPER["table1"].items()}
LANGUAGE = {task: _numbers(values) for task, values in _PAPER["table2"].items()}
LANGUAGE_AVERAGE = _numbers(_PAPER["average"])
RANDOM: dict[str, float] = _PAPER["random"]
SPREAD: str = _PAPER["spread"]
SELF_SUPERVISED = {task: _numbers(values) for task, values in _PAPER["table3"].items()}
COMPONENTS = _numbers(_PAPER["components"])


@dataclass(frozen=True)
class PaperExperiment:
    """The runs that a claim or a table is about, and the paper's set of heads for them."""

    objectives: list[str]
    heads: list[int]
    data_sets: list[str] | None = None  # None: all its runs are judged together, as `scope`
    scope: str = "other images"  # also for runs on none of the data sets

    @property
    def scopes(self) -> list[str]:
        return self.data_sets or [self.scope]

    def scope_of(self, run: RunResult) -> str:
        return (data_set_of(run) if self.data_sets else None) or self.scope


EXPERIMENTS = {name: PaperExperiment(**values) for name, values in _PAPER["experiments"].items()}


def runs_of(experiment: str, runs: Sequence[RunResult]) -> list[RunResult]:
    return [run for run in runs if run.objective in EXPERIMENTS[experiment].objectives]


def data_set_of(run: RunResult) -> str | None:
    """Recognise CIFAR10, CIFAR100 or ImageNet by the name of the source or by the names of the classes."""
    source = str((run.recipe.get("data") or {}).get("train", ""))
    classes = run.info.get("classes")
    names = {str(name) for name in classes} if isinstance(classes, list) else set()
    count = len(names) or (run.recipe.get("model") or {}).get("classes")
    for name, known in _PAPER["data_sets"].items():
        has_its_name = re.search(known["source"], source, re.IGNORECASE) is not None
        # The number of classes too: "imagenet" is also in the names of subsets such as imagenet-100.
        if count in (known["classes"], None) and (has_its_name or names.issuperset(known["names"])):
            return name
    return None


#: Keys that say where data is and how a machine processes it; they change numbers only by rounding. The images of
#: `data.train` are recognised by `data_set_of`, the text by its name.
_TECHNICAL = re.compile(
    r"(start\.)*(model\.laplacian_heads|model\.operators|data\.(train|revision|files|image_column|label_column|workers|"
    r"decoded_gigabytes)|train\.(micro_batch|device|threads|compile|deterministic|steps|epochs)|checkpoint\..*|"
    r"validation(\..*)?|tokenizer\.file)"
)
_LENGTH = ("train.steps", "train.epochs")
_TEXT = re.compile(_PAPER["text"], re.IGNORECASE)


def value_in_words(value: Any) -> str:
    """Return the value roughly as a recipe would write it; for a mixture of data sets, their names and rows."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and "name" in part for part in value):
        return ", ".join(str(part["name"]) + (f" ({part['rows']:,})" if part.get("rows") else "") for part in value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def recipe_differences(run: RunResult) -> list[tuple[str, Any, Any]] | None:
    """Return (key, the paper's, the run's) of each difference from the paper's recipe; None if there is no recipe.

    Laplacian heads and the paper's drop paths are its grid and do not count. Places of data, micro-batches, workers,
    devices, validation and checkpoints are left out; the length of training is compared in steps or epochs, whichever
    is given.
    """
    known = _recipe_entry(run)
    paper = None if known is None else _paper_recipe(known["recipe"], known.get("starts_from"), run.recipe.get("stage"))
    if known is None or paper is None:
        return None
    ours, theirs = dict(flatten(_without_places(run.recipe))), dict(flatten(_without_places(paper)))
    differences = list(_text_differences(theirs, ours))
    if ours.get("model.drop_path") in known.get("drop_paths", ()):
        theirs["model.drop_path"] = ours["model.drop_path"]
    for key in dict.fromkeys((*theirs, *ours)):
        plain_key = re.sub(r"^(start\.)+", "", key)
        is_inherited = plain_key != key and plain_key.startswith(("model.", "tokenizer."))  # compared in the last stage
        if not _TECHNICAL.fullmatch(key) and not is_inherited and ours.get(key) != theirs.get(key):
            differences.append((key, theirs.get(key), ours.get(key)))
    prefixes = {key.removesuffix(_LENGTH[0]) for key in theirs if key.endswith(_LENGTH[0])}
    for prefix in sorted(prefixes):
        papers, own_length = _length(theirs, prefix), _length(ours, prefix)
        if papers != own_length:
            differences.append((f"{prefix}train (length)", papers, own_length))
    return differences


def is_papers(run: RunResult) -> bool:
    """Return whether the run was trained by the paper's recipe: only its grid and technical keys may differ."""
    # Not `not ...`: None means that there is no recipe to compare with.
    return recipe_differences(run) == []


def _recipe_entry(run: RunResult) -> dict[str, Any] | None:
    """Return the entry of `paper.yaml` for the recipe of the run's experiment."""
    for entry in _PAPER["recipes"]:
        if entry["objective"] == run.objective and entry.get("data_set") in (None, data_set_of(run)):
            return entry
    return None


def _length(leaves: Mapping[str, Any], prefix: str) -> str:
    """Return the length of training; steps take precedence over epochs, as in training."""
    steps, epochs = (leaves.get(prefix + key) for key in _LENGTH)
    return f"{steps} steps" if steps is not None else f"{epochs} epochs"


def _text_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield differences if a language model, or a stage before it, was trained on other text than FineWeb-Edu.

    A copy is recognised by its name, or by the paper's shards, which `--data DIR` leaves in the recipe.
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
    """Shorten the source of each data set of a chat mixture to its last part, so that hub, address and copy agree."""
    if isinstance(value, dict):
        plain = {key: _without_places(inner) for key, inner in value.items() if key not in ("sha256", "revision")}
        if isinstance(value.get("source"), str):
            plain["source"] = value["source"].rstrip("/").rpartition("/")[2].rpartition(":")[2]
        return plain
    return [_without_places(inner) for inner in value] if isinstance(value, list) else value


@cache
def _paper_recipe(name: str, starts_from: str | None, stage: str | None) -> dict[str, Any] | None:
    """Return a shipped recipe as a run stores it, without its seed; a chat stage contains the stages before it."""

    def unseeded(recipe: Any) -> dict[str, Any]:
        return {key: value for key, value in recipe_to_dict(recipe).items() if key != "seed"}

    loaded = load_recipe(shipped_recipes() / f"{name}.yaml")
    if starts_from is None:
        return unseeded(loaded)
    before = _paper_recipe(starts_from, None, None)
    model = recipe_from_dict({**json.loads(json.dumps(before)), "seed": 0})
    assert isinstance(loaded, ChatRecipe)
    assert isinstance(model, GPTRecipe)
    for name_of_stage in STAGES:
        before = {**unseeded(stage_recipe(loaded, name_of_stage, model.model, model.tokenizer, None)), "start": before}
        if name_of_stage == stage:
            return before
    return None
