"""Shared parts of commands: options, declared once so that they read the same everywhere, tables that fit the terminal,
sizes and ages, and the question before a removal."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from lapcli.commands import completion
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import fitted


def _find(recipe: Path) -> Path:
    from lapcli.recipe import find_recipe

    return find_recipe(recipe)


def _recipe_argument(help_: str) -> Any:
    return typer.Argument(metavar="RECIPE", callback=_find, autocompletion=completion.recipes, help=help_)


Recipe = Annotated[Path, _recipe_argument("A YAML file, or the name of a shipped recipe, such as quickstart.")]
ChatRecipeFile = Annotated[Path, _recipe_argument("A chat recipe: a file, or a shipped one, such as chat_quickstart.")]
SweepFile = Annotated[Path, _recipe_argument("A recipe, or a sweep file, such as sweeps/laptop.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.settings,
        help="Change a key of the recipe, such as train.steps=100; repeatable.",
    ),
]
Data = Annotated[
    Path | None, typer.Option("--data", help="Local file or folder to read instead of the recipe's source.")
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run; by default the recipe's.")]
RunsDir = Annotated[
    Path | None, typer.Option("--runs-dir", help="Folder of the runs.", envvar="LAP_RUNS", show_default="runs")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed; by default the recipe's.")]
InitFrom = Annotated[
    str | None,
    typer.Option(
        "--init-from",
        metavar="SOURCE",
        help="Start from these weights: run:NAME[@step|best], timm:NAME, an exported folder, a nanochat checkpoint.",
    ),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", help="File with weights for --init-from timm:NAME, instead of the hub's.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move an existing run of that name aside and start over.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and stop; no data is read.")]
Nproc = Annotated[str, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine; auto: one per GPU.")]
Nnodes = Annotated[int, typer.Option("--nnodes", help="Number of machines.")]
NodeRank = Annotated[int | None, typer.Option("--node-rank", help="Rank of this machine; --rdzv names that of rank 0.")]
Rdzv = Annotated[str | None, typer.Option("--rdzv", metavar="HOST:PORT", help="Address at which the machines connect.")]
StepTimeout = Annotated[
    float,
    typer.Option(
        "--step-timeout",
        metavar="MINUTES",
        min=0.01,
        max=100_000,
        envvar="LAP_STEP_TIMEOUT",
        help="How long ranks wait for each other, also while one saves or compiles.",
    ),
]
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", help="How often to restart and resume after a rank has died.")
]


class TrackerName(StrEnum):
    """Names of trackers; typer accepts a list of an enum, but not of a Literal."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


Track = Annotated[
    list[TrackerName] | None,
    typer.Option(
        "--track", help="Mirror the run to this tracker while it trains, like the recipe's `track`; repeatable."
    ),
]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="last, best, or the step of a kept checkpoint.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, max=100, help="Sampling temperature; 0: always the likeliest token.")
]
TopK = Annotated[int, typer.Option("--top-k", min=1, help="Sample from the K likeliest tokens.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Dpi = Annotated[int, typer.Option("--dpi", min=30, max=1200, help="Resolution of PNG figures, in dots per inch.")]
Size = Annotated[
    str | None,
    typer.Option(
        "--size", metavar="WxH", help="Size of a figure in inches, such as 6x4.", show_default="by what it shows"
    ),
]


#: Names in other tools of keys in our recipes.
_ELSEWHERE = {"batch_size": "batch", "learning_rate": "lr", "max_steps": "steps", "num_epochs": "epochs"}


class RunCommand(TyperCommand):
    """A command that takes its run by --run: `lap eval NAME` is meant as `lap eval --run NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return list(super().parse_args(ctx, args))
        except TyperException as error:
            # Typer has no class of its own for this error, only its words; if they change, Typer's message is shown.
            extra = re.search(r"unexpected extra argument\(s\) \((.*)\)", str(error.message), re.DOTALL)
            if extra is None:
                raise
            prompt = ", give a text with --prompt" if any(p.name == "prompt" for p in self.params) else ""
            raise UsageError(
                f"{ctx.command_path} does not take {extra[1][:60]!r}; name a run with --run{prompt}"
            ) from None


class RunsCommand(TyperCommand):
    """A command whose arguments are runs: `lap watch --run NAME` is meant as `lap watch NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return list(super().parse_args(ctx, args))
        except TyperException as error:
            if getattr(error, "option_name", None) != "--run":
                raise
            name = f"lap {ctx.info_name}"
            raise UsageError(f"{name} has no --run; name its runs without it: {name} NAME") from None


class RecipeCommand(TyperCommand):
    """A command that explains unknown options which are keys of its recipe: for `--steps 5`, it suggests
    `--set train.steps=5`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A copy: the parser takes words out of `args` as it reads them.
        given = list(args)
        try:
            return list(super().parse_args(ctx, args))
        except TyperException as error:
            # `possibilities` marks Typer's NoSuchOption, which is not exported.
            if hasattr(error, "possibilities") and (meant := _settings_meant(error.option_name, given)):  # type: ignore[attr-defined]
                raise UsageError(
                    f"there is no option {error.option_name}; keys of the recipe are changed by --set: use "  # type: ignore[attr-defined]
                    + " or ".join(f"--set {setting}" for setting in meant)
                ) from None
            raise


def _settings_meant(option: str, line: list[str]) -> list[str]:
    """Return `KEY=VALUE` for each key of that name in the recipe of the line; empty without such a key or recipe."""
    from lapcli.recipe import find_recipe, load_recipe

    place = next((number for number, word in enumerate(line) if word.partition("=")[0] == option), len(line))
    _, equals, value = line[place].partition("=") if place < len(line) else ("", "", "")
    if not equals:
        value = line[place + 1] if place + 1 < len(line) and not line[place + 1].startswith("-") else "VALUE"
    try:
        recipe = next(path for word in line if word[:1] != "-" and (path := find_recipe(Path(word))).is_file())
        keys = completion.recipe_keys(type(load_recipe(recipe)))
    except (UsageError, StopIteration, OSError):
        return []
    name = option.lstrip("-").replace("-", "_")
    wanted = _ELSEWHERE.get(name, name)
    paths = [key.split(".") for key in keys]
    candidates = dict.fromkeys(tuple(path[: path.index(wanted) + 1]) for path in paths if wanted in path)
    least = min(map(len, candidates), default=0)  # `heads` means model.heads, not a deeper key of the same name
    return [f"{'.'.join(path)}={value}" for path in candidates if len(path) == least]


def init_from(source: str | None, weights: Path | None, section: str = "train") -> list[str]:
    """Return `--init-from` and `--weights` in the form of `--set`."""
    if source is None and weights is not None:
        raise UsageError("--weights is a file for --init-from timm:NAME; name the model with it")
    if source is None:
        return []
    given = {"source": source, **({} if weights is None else {"weights": str(weights)})}
    return [f"{section}.init_from={json.dumps(given, ensure_ascii=False)}"]


def overrides(set_: list[str] | None, data: Path | None) -> list[str]:
    """Return all changes to the recipe in the form of `--set`."""
    # Bytes of the command line that are not UTF-8 arrive as surrogates, which no YAML or JSON file can hold.
    if data is not None and (shown := str(data).encode("utf-8", "replace").decode()) != str(data):
        raise UsageError(
            f"--data {shown}: its name is not UTF-8, which a recipe needs; rename it, or make a link to it"
        )
    # A local copy has the hub's files but not its revisions.
    local = [] if data is None else [f"data.train={json.dumps(str(data), ensure_ascii=False)}", "data.revision=null"]
    return [*(set_ or []), *local]


def runs_dir_option(folder: Path) -> str:
    """Return ` --runs-dir FOLDER` for a command to try next; empty for the folder that it reads anyway."""
    return "" if folder == default_runs_dir() else f" --runs-dir {shlex.quote(str(folder))}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format columns side by side; if that is wider than the terminal, as a short list for each row."""
    return "\n".join(fitted([headers, *rows], width=width))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def size_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def age_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ask_to_confirm(question: str, yes: bool) -> bool:
    """Return whether the user agrees, by --yes or by an answer in the terminal; raise UsageError without a terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to answer on; use --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
