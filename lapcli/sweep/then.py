"""What follows a cell's training (`eval`, `analyze`, `sft`) and what ends a sweep (`report`), checked beforehand."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.evaluation.tasks import chosen_tasks
from lapcli.kinds.chat import load_chat_recipe
from lapcli.recipe import recipe_to_dict
from lapcli.recipe.reading import Problem
from lapcli.report.grouping import check_rows, row_keys
from lapcli.runtime.errors import LapError, UsageError

if TYPE_CHECKING:
    from lapcli.sweep.cells import Cell

COMMANDS = ("eval", "analyze", "sft")


def filled(text: str, run: str, seed: int, folder: Path) -> str:
    """A command of `then` for one run; without {run}, `--run` is added."""
    known = {"{run}": run, "{seed}": str(seed), "{folder}": str(folder)}
    named = "{run}" in text
    for mark, value in known.items():
        text = text.replace(mark, shlex.quote(value))
    return text if named else f"{text} --run {shlex.quote(run)}"


def arguments(text: str, runs_dir: Path) -> list[str]:
    """The words that follow `lap`."""
    return [*shlex.split(text), "--runs-dir", str(runs_dir)]


#: The words after `lap` to the name and the options of their command; UsageError says why they would be refused.
Parse = Callable[[list[str]], tuple[str, Mapping[str, Any]]]


def check_then(
    texts: Sequence[str], cells: "Sequence[Cell]", place: Callable[..., str], parse: Parse | None
) -> list[Problem]:
    """Reports commands that do not exist, options that they do not have, and tasks that do not fit the runs."""
    problems = []
    for number, text in enumerate(texts):
        sample = next((cell.then[number] for cell in cells if cell.then), None)
        if sample is None:
            continue
        objective = next(cell.loaded.objective for cell in cells if cell.then)
        named = objective if "{run}" not in text else None  # a chat stage of the run is of another kind
        try:
            name, options = _parsed(sample, COMMANDS, parse)
            if name == "eval" and named and options.get("tasks"):
                chosen_tasks(named, options["tasks"])
            if name == "sft":
                recipe, set_ = options["recipe"], list(options["set_"] or [])
                load_chat_recipe(recipe, set_, options["data"], options["seed"])
        except LapError as error:
            problems.append(Problem(place("then", number), "then", f"{error}, in {text[:100]!r}"))
    return problems


def check_report(texts: Sequence[str], cells: "Sequence[Cell]", place: str, parse: Parse | None) -> list[Problem]:
    """The same for the options of the reports that end a sweep."""
    problems = []
    for text in texts:
        try:
            _, options = _parsed(f"report {text}", ("report",), parse)
            if options:
                given = (options[option] for option in ("paper", "format_", "rows", "columns", "baseline"))
                check_rows(row_keys(*given), [recipe_to_dict(cell.loaded) for cell in cells])
        except LapError as error:
            problems.append(Problem(place, "report", f"{error}, in {text[:100]!r}"))
    return problems


def _parsed(text: str, allowed: Sequence[str], parse: Parse | None) -> tuple[str, Mapping[str, Any]]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"quotes do not match ({error})") from None
    if not words or words[0] not in allowed:
        raise UsageError(f"expected a command among {', '.join(allowed)}")
    if "--help" in words or "-h" in words or "--runs-dir" in words:
        raise UsageError("--help and --runs-dir mean nothing here")
    return ("", {}) if parse is None else parse(words)
