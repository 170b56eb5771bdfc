"""Options shared by commands, so that they read the same everywhere, and their shell completion."""

import json
import shlex
from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import fitted

if TYPE_CHECKING:
    from lapcli.recipe import AnyRecipe


def run_names(incomplete: str) -> list[str]:
    """Complete the name of a run."""
    names = [path.parent.name for path in default_runs_dir().glob("*/run.json")]
    return sorted(name for name in names if name.startswith(incomplete))


def recipe_names(incomplete: str) -> list[str]:
    """Complete a recipe: shipped ones by name, and files and folders that begin with the typed text."""
    from lapcli.recipe.loading import shipped_recipes

    folder = shipped_recipes()
    names = [str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.rglob("*.yaml"))]
    below = [f"{path}/" if Path(path).is_dir() else path for path in sorted(glob(f"{escape(incomplete)}*"))]
    names += [path for path in below if path.endswith(("/", ".yaml", ".yml"))]
    return [name for name in names if name.startswith(incomplete)]


def _recipe_argument(help_: str) -> Any:
    def _find(recipe: Path) -> Path:
        from lapcli.recipe import find_recipe

        return find_recipe(recipe)

    return typer.Argument(metavar="RECIPE", callback=_find, autocompletion=recipe_names, help=help_)


Recipe = Annotated[Path, _recipe_argument("A YAML file, or the name of a shipped recipe, such as quickstart.")]
ChatRecipeFile = Annotated[Path, _recipe_argument("A chat recipe: a file, or a shipped one, such as chat_quickstart.")]
SweepFile = Annotated[Path, _recipe_argument("A recipe, or a sweep file, such as sweeps/laptop.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, such as train.steps=100; repeatable."),
]
Data = Annotated[
    Path | None, typer.Option("--data", help="Local file or folder to read instead of the recipe's source.")
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        autocompletion=run_names,
        help="Name or folder of a run; by default the newest finished one that fits.",
        show_default=False,
    ),
]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUNS",
        autocompletion=run_names,
        help="Names, folders or patterns of runs; by default all.",
        show_default=False,
    ),
]
RunOption = Annotated[str | None, typer.Option("--run", autocompletion=run_names, help="Another spelling of RUN.")]
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
        help="Start from these weights: run:NAME[@step|best] or timm:NAME.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move an existing run of that name aside and start over.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and stop; no data is read.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, max=1024, help="Concurrent runs, which share the GPUs. Default: 1.")
]
Nproc = Annotated[str, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine; auto: one per GPU.")]
Nnodes = Annotated[
    str, typer.Option("--nnodes", metavar="N|MIN:MAX", help="Number of machines, or the range of an elastic launch.")
]
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
        help="Minutes that ranks wait for each other, including while one saves or compiles.",
    ),
]
MaxRestarts = Annotated[int, typer.Option("--max-restarts", help="Maximum number of restarts after a rank has died.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="last, best, or the step of a kept checkpoint.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, max=100, help="Sampling temperature; 0 is greedy decoding.")
]
TOP_K = 50  # samples are drawn from the likeliest tokens
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def one_run(by_position: str | None, by_option: str | None) -> str | None:
    """Return the run named by position or by --run; None if neither is given."""
    if by_position is not None and by_option is not None:
        raise UsageError(f"{by_position[:60]!r} and --run {by_option[:60]!r} name two runs; leave one of them out")
    return by_option if by_position is None else by_position


def init_from(source: str | None) -> list[str]:
    """Return `--init-from` in the form of `--set`."""
    return [] if source is None else [f"train.init_from.source={json.dumps(source, ensure_ascii=False)}"]


def overrides(set_: list[str] | None, data: Path | None) -> list[str]:
    """Return all changes to the recipe in the form of `--set`."""
    # Bytes of the command line that are not UTF-8 arrive as surrogates, which no YAML or JSON file can hold.
    if data is not None and (shown := str(data).encode("utf-8", "replace").decode()) != str(data):
        raise UsageError(f"--data {shown}: its name is not UTF-8, as recipes require; rename it, or link to it")
    # A local copy has the hub's files but no revisions.
    local = [] if data is None else [f"data.train={json.dumps(str(data), ensure_ascii=False)}", "data.revision=null"]
    return [*(set_ or []), *local]


def load_with_data(path: Path, set_: list[str] | None, data: Path | None, seed: int | None = None) -> "AnyRecipe":
    """Load a recipe of any objective; `data` is a local file or folder that replaces its own sources."""
    from lapcli.data.chat.mixture import with_local_data
    from lapcli.recipe import load_recipe
    from lapcli.recipe.chat import ChatRecipe

    loaded = load_recipe(path, set_ or [], seed)
    if data is not None and isinstance(loaded, ChatRecipe):
        return with_local_data(loaded, data)
    return loaded if data is None else load_recipe(path, overrides(set_, data), seed)


def runs_dir_option(folder: Path) -> str:
    """Return ` --runs-dir FOLDER` for a command to try next; empty for the default folder."""
    return "" if folder == default_runs_dir() else f" --runs-dir {shlex.quote(str(folder))}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    return "\n".join(fitted([headers, *rows], width=width))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))
