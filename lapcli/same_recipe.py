"""Equality of recipes: for averages over seeds and for the comparison with the paper.

Two runs have the same recipe if they agree in every key except the seed, names, and keys that a resume may change
(`runs.FREE_KEYS`). A stage of chat training is compared with all stages before it. Against the paper, the Laplacian
heads and the drop paths of its grid are free too, and data is recognised by its content instead of its location.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lapcli.recipe import BaseRecipe, find_recipe, load_recipe, recipe_to_dict
from lapcli.recipe.chat import STAGES, ChatRecipe, ChatStageRecipe, stage_recipe
from lapcli.recipe.schema import RUN
from lapcli.runs import FREE_KEYS, INFO, Run, read_run

HEADS, OPERATORS, DROP_PATH = "model.laplacian_heads", "model.operators", "model.drop_path"
DROP_PATHS = (0.1, 0.3, 0.4)  # the paper's, of image classification
#: Data sets of the paper: names of their sources, or the number of classes and some class names.
_DATA_SETS: dict[str, tuple[str, int | None, set[str]]] = {
    "CIFAR10": (r"cifar-?10(?!0)", 10, {"airplane", "frog"}),
    "CIFAR100": (r"cifar-?100", 100, {"aquarium_fish", "willow_tree"}),
    "ImageNet": (r"imagenet", 1000, {"n01440764"}),
    "FineWeb-Edu": (r"fineweb[-_ ]?edu", None, set()),
}
_PLACES = re.compile(
    r"(start\.)*(data\.(train|revision|files|label_column)|tokenizer\.file|train\.(device|init_from.*))"
)
Difference = tuple[str, Any, Any]  # key, the paper's value, ours


@dataclass(frozen=True)
class WholeRecipe:
    """The compared keys of a run, with those of the stages before it as `start.KEY`."""

    keys: dict[str, Any]
    seeds: tuple[str, ...]  # of all stages, the first one's first
    first: Mapping[str, Any]  # `run.json` of the first stage; empty if that run is missing
    missing: str | None = None  # the run that this one started from, if it is not there any more


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a recipe with their dotted keys; head plans and lists are leaves."""
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping) and key not in (HEADS, OPERATORS):
            yield from leaves(inner, f"{key}.")
        else:
            yield key, inner


def compared_keys(recipe: BaseRecipe) -> dict[str, Any]:
    """Return the keys of a recipe that make it this recipe, with their values."""
    counted = {"train.micro_batch"} if recipe.micro_batch_counts else set()
    is_stage = isinstance(recipe, ChatStageRecipe)  # its weights are those of its start, which differ by seed
    return {
        key: value
        for key, value in leaves(recipe_to_dict(recipe))
        if key != "seed"
        and (key in counted or not FREE_KEYS.fullmatch(key))
        and not (is_stage and key.startswith("train.init_from"))
    }


def whole_recipe(run: Run) -> WholeRecipe:
    keys, seed = compared_keys(run.recipe), str(run.recipe.seed)
    given = run.recipe.train.init_from
    if not isinstance(run.recipe, ChatStageRecipe) or given is None:
        return WholeRecipe(keys, (seed,), run.info)
    name = given.source.removeprefix(RUN).partition("@")[0]
    before = run.path.parent / name if (run.path.parent / name / INFO).is_file() else Path(name)
    if not (before / INFO).is_file():
        # The name replaces the unknown seeds and distinguishes stages with different starts.
        return WholeRecipe(keys, (Path(name).name.replace("+", "-"), seed), {}, name)
    earlier = whole_recipe(read_run(before))
    return WholeRecipe({**keys, **_as_start(earlier.keys)}, (*earlier.seeds, seed), earlier.first, earlier.missing)


def _as_start(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a stage before this one, without the model, which a stage inherits."""
    return {
        f"start.{key}": value
        for key, value in keys.items()
        if not re.sub(r"^(start\.)+", "", key).startswith(("model.", "tokenizer."))
    }


def data_set_of(keys: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
    """Recognise a data set of the paper by the name of the source or by the names of the classes."""
    source, classes = str(keys.get("data.train", "")), info.get("classes")
    names = {str(name) for name in classes} if isinstance(classes, list) else set()
    count = len(names) or keys.get("model.classes")
    for name, (pattern, number, some) in _DATA_SETS.items():
        is_named = re.search(pattern, source, re.IGNORECASE) is not None
        # The number of classes too: "imagenet" is also in the names of subsets such as imagenet-100.
        if (number is None or count in (number, None)) and (is_named or (some and names >= some)):
            return name
    return None


def paper_differences(run: Run) -> list[Difference] | None:
    """Return the differences from the paper's nearest recipe; None if the paper has none of this kind."""
    name = run.recipe.paper_recipe()
    if name is None:
        return None
    theirs = _paper_keys(name, getattr(run.recipe, "stage", None))
    ours = whole_recipe(run).keys
    differences: list[Difference] = []
    is_image_grid = run.recipe.objective == "classification" and ours.get(DROP_PATH) in DROP_PATHS
    free = {HEADS, OPERATORS} | ({DROP_PATH} if is_image_grid else set())
    for key in dict.fromkeys((*theirs, *ours)):
        papers, own = _without_places(theirs.get(key)), _without_places(ours.get(key))
        if re.fullmatch(r"(start\.)*data\.train", key):
            files = key.removesuffix("train") + "files"
            expected = data_set_of({**theirs, "data.train": theirs.get(key)}, {})
            found = data_set_of({**ours, "data.train": ours.get(key)}, run.info)
            # A copy of the text is recognised by the paper's shards, which `--data FOLDER` leaves in the recipe.
            if theirs.get(files) is not None and theirs.get(files) == ours.get(files):
                continue
            if expected is not None and expected != found:
                differences.append((key, expected, own))
            elif theirs.get(files) is not None and ours.get(files) is not None:
                differences.append((files, theirs.get(files), ours.get(files)))
        elif key not in free and not _PLACES.fullmatch(key) and papers != own:
            differences.append((key, papers, own))
    return differences


@cache
def _paper_keys(name: str, stage: str | None) -> dict[str, Any]:
    """Return the compared keys of a shipped recipe; for a chat recipe those of the stage and all earlier stages."""
    loaded: Any = load_recipe(find_recipe(name))
    if not isinstance(loaded, ChatRecipe):
        return compared_keys(loaded)
    start: Any = load_recipe(find_recipe("gpt561m"))
    keys = compared_keys(start)
    for each in STAGES:
        keys = {**compared_keys(stage_recipe(loaded, each, start.model, start.tokenizer, None)), **_as_start(keys)}
        if each == stage:
            break
    return keys


def _without_places(value: Any) -> Any:
    """Shorten the source of each data set of a chat mixture to its last part, so that hub, address and copy agree."""
    if isinstance(value, dict):
        plain = {key: _without_places(inner) for key, inner in value.items() if key != "revision"}
        plain["held_out"] = plain.get("held_out") or None  # none held out, by default or because it is a copy
        if isinstance(value.get("source"), str):
            plain["source"] = value["source"].rstrip("/").rpartition("/")[2].rpartition(":")[2]
        return plain
    return [_without_places(inner) for inner in value] if isinstance(value, list) else value
