"""The commands that reproduce a number: how a run was trained, evaluated and analysed, and the table that shows it.

Training, or a stage of chat training, is given as a shipped recipe with changes, if that gives exactly the run's
recipe; else as the recipe file in the run's folder, which `lap train` accepts.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lapcli.analysis.measurements import MEASUREMENTS
from lapcli.recipe import load_recipe, recipe_to_dict
from lapcli.recipe.chat import ChatRecipe, ChatStageRecipe, stage_recipe
from lapcli.recipe.loading import shipped_recipes
from lapcli.recipe.schema import RUN, AnyRecipe
from lapcli.report.collect import Number, RunResult
from lapcli.report.grouping import HEADS, flatten
from lapcli.runs import RECIPE, Run, read_run
from lapcli.runtime.errors import LapError

_MOST, _LONGEST = 10, 160  # changes of a shipped recipe, and characters of one; beyond, the run's own file is shorter
_EVALUATION = {"limit": "--limit", "protocol": "--protocol", "temperature": "--temperature", "top_k": "--top-k"}
_EVALUATION["max_tokens"] = "--max-tokens"


def commands_of(run: RunResult) -> list[str]:
    """Return all commands of a run, in the order in which they are run."""
    return [training_command(run), *evaluation_commands(run), *analysis_commands(run)]


def training_command(run: RunResult) -> str:
    """Return the import of an imported run; else the training by a shipped recipe or by the run's own recipe file."""
    kept = read_run(run.path)
    if imported := kept.info.get("imported_from"):
        words = ["lap", "import", str(imported["file"]), "--to", run.name]
    else:
        # Another name: under its own, `lap train` would only say that the run is finished.
        own = ["lap", "train", str(run.path / RECIPE), "--name", f"{run.name}-again"]
        words = (_shipped_stage(kept) if "stage" in run.recipe else _shipped_training(kept)) or own
    return shlex.join([*words, *_runs_dir(run.path.parent)])


def _runs_dir(folder: Path) -> list[str]:
    return [] if folder == Path("runs") else ["--runs-dir", str(folder)]


def _checkpoint(runs: Sequence[RunResult]) -> list[str]:
    """Return the option for the scores of the best weights, which runs have together or not at all."""
    return ["--checkpoint", "best"] if any(run.best_step is not None for run in runs) else []


def _shipped_training(run: Run) -> list[str] | None:
    seed = str(recipe_to_dict(run.recipe).get("seed") or 0)
    recipe = _nearest(run.recipe, _shipped(run.recipe.objective), lambda name, given: _load(name, given, seed))
    return recipe and ["lap", "train", recipe[0], "--name", run.name, "--seed", seed, *recipe[1]]


def _shipped_stage(run: Run) -> list[str] | None:
    """Return the words for a stage of a shipped chat recipe, from the start of the run's stage."""
    kept = run.recipe
    assert isinstance(kept, ChatStageRecipe)
    start, stage, seed = kept.train.init_from, kept.stage, str(kept.seed)
    if start is None or not run.name.endswith(f"-{stage}"):  # the name that `lap sft --name` gives
        return None

    def load(name: str, settings: list[str]) -> AnyRecipe | None:
        chat = _load(name, [f"stages.{stage}.{setting}" for setting in settings], seed)
        if not isinstance(chat, ChatRecipe) or stage not in chat.stages.given():
            return None
        return stage_recipe(chat, stage, kept.model, kept.tokenizer, start)

    staged = {path.stem: load(path.stem, []) for path in sorted(shipped_recipes().glob("chat*.yaml"))}
    nearest = _nearest(kept, {name: _leaves(recipe_to_dict(recipe)) for name, recipe in staged.items() if recipe}, load)
    if nearest is None:
        return None
    settings = [word if word == "--set" else f"stages.{stage}.{word}" for word in nearest[1]]
    name, source = run.name.removesuffix(f"-{stage}"), start.source.removeprefix(RUN)
    return ["lap", "sft", nearest[0], "--stage", stage, "--run", source, "--name", name, "--seed", seed, *settings]


def _nearest(
    kept: AnyRecipe, shipped: dict[str, dict[str, Any]], load: Callable[[str, list[str]], AnyRecipe | None]
) -> tuple[str, list[str]] | None:
    """Return the shipped recipe that gives the kept one with the fewest changes, and those as `--set` options."""
    kept_leaves = _leaves(recipe_to_dict(kept))
    near: list[tuple[int, str, dict[str, Any]]] = []
    for name, leaves in shipped.items():
        changed = {key: value for key, value in kept_leaves.items() if key != "seed" and leaves.get(key) != value}
        if set(leaves) <= set(kept_leaves):  # `--set` cannot remove a key
            near.append((len(changed), name, changed))
    for count, name, changed in sorted(near, key=lambda entry: entry[:2])[:3]:
        settings = [f"{key}={_value(value)}" for key, value in changed.items()]
        if count > _MOST or any(len(setting) > _LONGEST for setting in settings):
            return None
        loaded = load(name, settings)
        # Loaded and compared as a whole: a `--set` may be refused, or change other keys of the recipe too.
        if loaded is not None and recipe_to_dict(loaded) == recipe_to_dict(kept):
            return name, [word for setting in settings for word in ("--set", setting)]
    return None


def _load(name: str, settings: list[str], seed: str) -> AnyRecipe | None:
    try:
        return load_recipe(shipped_recipes() / f"{name}.yaml", settings, int(seed))
    except LapError:
        return None


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _shipped(objective: str) -> dict[str, dict[str, Any]]:
    """Return the leaves of the shipped recipes of a kind, by name."""
    leaves = {}
    for path in sorted(shipped_recipes().glob("*.yaml")):
        try:
            recipe = load_recipe(path)
        except LapError:  # of a kind from a plugin
            continue
        if recipe.objective == objective:
            leaves[path.stem] = _leaves(recipe_to_dict(recipe))
    return leaves


def _leaves(recipe: dict[str, Any]) -> dict[str, Any]:
    return dict(flatten(recipe))


def evaluation_commands(run: RunResult) -> list[str]:
    """Return `lap eval` for each set of tasks that were measured under the same conditions."""
    by_way: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, number in run.numbers.items():
        task = name.split(" [")[0]
        # Files of `lap eval` are named by their step; other numbers are of the training itself.
        if number.source.startswith("step-") and "." not in task:
            by_way.setdefault(number.conditions, []).append(task)
    commands = []
    for conditions, tasks in by_way.items():
        words = ["lap", "eval", "--run", run.name, "--tasks", ",".join(dict.fromkeys(tasks))]
        for key, value in conditions:
            if key == "metric":
                words += ["--samples", value.removeprefix("pass@")]
            elif key == "on":
                words += ["--data", value.split(":")[0]]
            else:
                words += [_EVALUATION[key], value] if key in _EVALUATION else ["--set", f"{key}={value}"]
        commands.append(shlex.join([*words, *_checkpoint([run]), *_runs_dir(run.path.parent)]))
    return commands


def analysis_commands(run: RunResult) -> list[str]:
    """Return `lap analyze` for each measurement, on the sequences or images that were measured."""
    commands: dict[str, None] = {}
    for name, number in run.numbers.items():
        what, dot, _ = name.split(" [")[0].partition(".")
        if dot and what in MEASUREMENTS:
            commands[shlex.join(_analysis(what, [run], dict(number.conditions), number))] = None
    return list(commands)


def _analysis(what: str, runs: Sequence[RunResult], conditions: dict[str, str], number: Number | None) -> list[str]:
    flags = {option.name: option.flag for option in MEASUREMENTS[what].options} | {"split": "--split"}
    words = ["lap", "analyze", what, *(word for run in runs for word in ("--run", run.name))]
    for key, value in conditions.items():
        words += ["--data", value.split(" ")[0]] if key == "on" else [flags.get(key, f"--{key}"), value]
    if number and number.seed:
        words += ["--seed", str(number.seed)]
    return [*words, *_checkpoint(runs), *_runs_dir(runs[0].path.parent)]


def figure_command(what: str, runs: Sequence[RunResult]) -> str:
    """Return the command that draws the figure of an analysis of these runs."""
    numbers = [number for run in runs for name, number in run.numbers.items() if name.startswith(f"{what}.")]
    number = min(numbers, key=lambda number: len(number.conditions), default=None)
    return shlex.join(_analysis(what, runs, dict(number.conditions) if number else {}, number))


def drawing_command(runs: Sequence[RunResult]) -> str:
    """Return the command that writes the page's curves of these runs as files."""
    names = [run.name for run in runs]
    return shlex.join(["lap", "report", *names, "--format", "svg", *_runs_dir(runs[0].path.parent)])


def paper_command(which: str, runs: Sequence[RunResult], folders: Sequence[Path]) -> str:
    """Return the command that prints a table of the paper beside ours."""
    place = _runs_dir(folders[0]) if folders else []
    return shlex.join(["lap", "report", "--paper", which, *_checkpoint(runs), *place])


def table_command(runs: Sequence[RunResult], columns: Sequence[str], rows: Sequence[str], runs_dir: Path) -> str:
    words = ["lap", "report", *(run.name for run in runs), "--columns", ",".join(columns)]
    words += [] if list(rows) == [HEADS] else ["--rows", ",".join(rows)]
    return shlex.join([*words, *_checkpoint(runs), *_runs_dir(runs_dir)])
