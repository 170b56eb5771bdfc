"""The commands that give a number again: how a run was trained, evaluated and analysed, and the table it stands in.

A run's training is told as a shipped recipe and what was changed of it, where that gives exactly the run's recipe;
else by the recipe that the run keeps.
"""

import json
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lapcli.analysis.measurements import MEASUREMENTS
from lapcli.kinds import KINDS
from lapcli.kinds.kind import LANGUAGE
from lapcli.recipe import load_recipe, recipe_to_dict
from lapcli.recipe.loading import shipped_recipes
from lapcli.report.collect import RunResult
from lapcli.report.grouping import HEADS, flatten
from lapcli.runs import RECIPE, read_run
from lapcli.runtime.errors import LapError

_MOST = 10  # changes of a shipped recipe; beyond them the run's own is shorter
_EVALUATION = {"limit": "--limit", "protocol": "--protocol", "temperature": "--temperature", "top_k": "--top-k"}
_EVALUATION["max_new_tokens"] = "--max-new-tokens"


def commands_of(run: RunResult) -> list[str]:
    """All of them, in the order in which they are run."""
    return [training_command(run), *evaluation_commands(run), *analysis_commands(run)]


def training_command(run: RunResult) -> str:
    recipe = run.path / RECIPE
    if "stage" in run.recipe:
        start = (recipe_to_dict(read_run(run.path).recipe).get("start") or {}).get("run", "RUN")
        chat = _shipped_chat(run)
        file = chat or "RECIPE"
        line = f"lap sft {file} --run {shlex.quote(str(start))} --stage {run.recipe['stage']}"
        return line if chat else f"{line}  # with the stage's values in {recipe}"
    return _from_shipped(run) or f"lap train {shlex.quote(str(recipe))} --name {shlex.quote(run.name)}-again"


def _from_shipped(run: RunResult) -> str | None:
    kept = read_run(run.path).recipe
    own = _leaves(recipe_to_dict(kept))
    near: list[tuple[int, str, dict[str, Any]]] = []
    for name, leaves in _shipped(run.objective).items():
        changed = {key: value for key, value in own.items() if key != "seed" and leaves.get(key) != value}
        if set(leaves) <= set(own):  # a key cannot be taken away
            near.append((len(changed), name, changed))
    for count, name, changed in sorted(near, key=lambda entry: entry[:2])[:3]:
        if count > _MOST:
            return None
        settings = [f"{key}={_value(value)}" for key, value in changed.items()]
        try:
            loaded = load_recipe(shipped_recipes() / f"{name}.yaml", settings, int(own.get("seed") or 0))
        except LapError:
            continue
        if recipe_to_dict(loaded) == recipe_to_dict(kept):
            words = ["lap", "train", name, "--name", run.name, "--seed", str(own.get("seed") or 0)]
            return shlex.join([*words, *(word for setting in settings for word in ("--set", setting))])
    return None


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _shipped(objective: str) -> dict[str, dict[str, Any]]:
    """The leaves of the shipped recipes of a kind, by name."""
    found = {}
    for path in sorted(shipped_recipes().glob("*.yaml")):
        try:
            recipe = load_recipe(path)
        except LapError:  # of a kind from another package
            continue
        if recipe.objective == objective:
            found[path.stem] = _leaves(recipe_to_dict(recipe))
    return found


def _leaves(recipe: dict[str, Any]) -> dict[str, Any]:
    return dict(flatten(recipe))


def _shipped_chat(run: RunResult) -> str | None:
    """The shipped chat recipe whose stage is the run's: the same data and training."""
    from lapcli.recipe.chat import ChatRecipe

    for path in sorted(shipped_recipes().glob("chat*.yaml")):
        recipe = load_recipe(path)
        if isinstance(recipe, ChatRecipe):
            stage = recipe.stages.given().get(run.recipe["stage"])
            told = json.loads(stage.model_dump_json()) if stage is not None else {}
            if told and all(run.recipe.get(key) == value for key, value in told.items() if key in run.recipe):
                return path.stem
    return None


def evaluation_commands(run: RunResult) -> list[str]:
    """`lap eval` for each set of tasks that were measured in one way."""
    by_way: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, number in run.numbers.items():
        task = name.split(" [")[0]
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
        commands.append(shlex.join(words))
    return commands


def analysis_commands(run: RunResult) -> list[str]:
    """`lap analyze` for each measurement, on as many sequences as were measured."""
    found: dict[str, None] = {}
    for name, number in run.numbers.items():
        what, dot, _ = name.split(" [")[0].partition(".")
        if dot and what in MEASUREMENTS:
            found[shlex.join(_analysis(what, [run], dict(number.conditions), number.count))] = None
    return list(found)


def _analysis(what: str, runs: Sequence[RunResult], conditions: dict[str, str], count: int | None) -> list[str]:
    flags = {option.name: option.flag for option in MEASUREMENTS[what].options} | {"split": "--split"}
    words = ["lap", "analyze", what, *(word for run in runs for word in ("--run", run.name))]
    for key, value in conditions.items():
        words += ["--data", value.split(" ")[0]] if key == "on" else [flags.get(key, f"--{key}"), value]
    if count and LANGUAGE in KINDS[runs[0].objective].gives:
        words += ["--limit", str(count)]
    return words


def figure_command(what: str, runs: Sequence[RunResult]) -> str:
    """Of a figure of an analysis of these runs."""
    counts = [number.count for run in runs for name, number in run.numbers.items() if name.startswith(f"{what}.")]
    return shlex.join(_analysis(what, runs, {}, counts[0] if counts else None))


def table_command(runs: Sequence[RunResult], columns: Sequence[str], rows: Sequence[str], runs_dir: Path) -> str:
    words = ["lap", "report", *(run.name for run in runs), "--columns", ",".join(columns)]
    words += [] if list(rows) == [HEADS] else ["--rows", ",".join(rows)]
    return shlex.join([*words, "--runs-dir", str(runs_dir)] if runs_dir != Path("runs") else words)
