"""What follows a cell's training (`eval`, `analyze`, `sft`) and what ends a sweep (`report`), checked beforehand."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.recipe.reading import Problem
from lapcli.runtime.errors import LapError

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


def check_then(texts: Sequence[str], cells: "Sequence[Cell]", place: Callable[..., str]) -> list[Problem]:
    """Commands that there are, with options that they have and tasks that fit the runs."""
    problems = []
    for number, text in enumerate(texts):
        sample = next((cell.then[number] for cell in cells if cell.then), None)
        if sample is None:
            continue
        objective = next(cell.loaded.objective for cell in cells if cell.then)
        named = objective if "{run}" not in text else None  # a chat stage of the run is of another kind
        reason = _refused(sample, COMMANDS, named)
        if reason:
            problems.append(Problem(place("then", number), "then", f"{reason}, in {text[:100]!r}"))
    return problems


def check_report(texts: Sequence[str], cells: "Sequence[Cell]", place: str) -> list[Problem]:
    found = [(text, _refused(f"report {text}", ("report",), None, cells)) for text in texts]
    return [Problem(place, "report", f"{reason}, in {text[:100]!r}") for text, reason in found if reason]


def _refused(text: str, allowed: Sequence[str], objective: str | None, reported: "Sequence[Cell]" = ()) -> str | None:
    """Why `lap TEXT` would be refused, found by its own parser; none if it would not."""
    from typer import Context
    from typer.core import TyperGroup
    from typer.exceptions import TyperException
    from typer.main import get_command

    from lapcli.cli import app

    try:
        words = shlex.split(text)
    except ValueError as error:
        return f"quotes do not match ({error})"
    if not words or words[0] not in allowed:
        return f"expected a command among {', '.join(allowed)}"
    if "--help" in words or "-h" in words or "--runs-dir" in words:
        return "--help and --runs-dir mean nothing here"
    command: Any = get_command(app)
    while isinstance(command, TyperGroup):
        context = Context(command)
        known = command.list_commands(context)
        if not words or words[0] not in known:
            return f"expected one of {', '.join(known)}, got {words[0] if words else 'nothing'}"
        command, name, words = command.get_command(context, words[0]), words[0], words[1:]
    try:
        given = command.make_context(name, words).params
    except TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return str(message).rstrip(".")
    try:
        if name == "eval" and objective and given["tasks"]:
            from lapcli.evaluation.tasks import chosen_tasks

            chosen_tasks(objective, given["tasks"])
        if name == "sft":
            from lapcli.commands.options import chat_recipe

            chat_recipe(given["recipe"], list(given["set_"] or []), given["data"], given["seed"])
        if name == "report":
            from lapcli.commands.report import checked_rows
            from lapcli.recipe import recipe_to_dict
            from lapcli.report.grouping import check_rows

            options = (given[option] for option in ("paper", "format_", "rows", "columns", "baseline"))
            check_rows(checked_rows(*options), [recipe_to_dict(cell.loaded) for cell in reported])
    except LapError as error:
        return str(error)
    return None
