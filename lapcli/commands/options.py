"""The options that commands share, declared once so that they read the same everywhere."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lapcli.commands import completion


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
Seed = Annotated[int | None, typer.Option("--seed", help="The recipe's seed, replaced.")]
InitFrom = Annotated[
    str | None,
    typer.Option(
        "--init-from",
        metavar="SOURCE",
        help="Begin with these weights: run:NAME[@step|best], timm:NAME, an exported folder, a nanochat checkpoint.",
    ),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", help="File with weights for --init-from timm:NAME, instead of the hub's.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move an old run of that name aside and start anew.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be trained; touch no data.")]
Nproc = Annotated[str, typer.Option("--nproc", metavar="N|auto", help="Processes here; auto: one a GPU.")]
Nnodes = Annotated[int, typer.Option("--nnodes", help="Machines.")]
NodeRank = Annotated[int | None, typer.Option("--node-rank", help="Number of this machine; 0 is the one of --rdzv.")]
Rdzv = Annotated[str | None, typer.Option("--rdzv", metavar="HOST:PORT", help="Where the machines meet.")]
StepTimeout = Annotated[
    float,
    typer.Option(
        "--step-timeout",
        metavar="MINUTES",
        min=0.01,
        max=100_000,
        envvar="LAP_STEP_TIMEOUT",
        help="Longest wait of the ranks for each other in a step; the first one and saves are not timed.",
    ),
]
MaxRestarts = Annotated[int, typer.Option("--max-restarts", help="Times to start again and resume after a rank died.")]


class TrackerName(StrEnum):
    """typer takes a list of these, and no list of literals."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


Track = Annotated[
    list[TrackerName] | None,
    typer.Option("--track", help="Mirror the run there while it is trained, as the recipe's `track`; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Dpi = Annotated[int, typer.Option("--dpi", min=30, max=1200, help="Dots an inch of PNG figures.")]
Size = Annotated[
    str | None,
    typer.Option("--size", metavar="WxH", help="Inches of a figure, as 6x4.", show_default="by what it shows"),
]


def init_from(source: str | None, weights: Path | None, section: str = "train") -> list[str]:
    """`--init-from` and `--weights`, in the form of `--set`."""
    import json

    from lapcli.runtime.errors import UsageError

    if source is None and weights is not None:
        raise UsageError("--weights is a file for --init-from timm:NAME; name the model with it")
    if source is None:
        return []
    given = {"source": source, **({} if weights is None else {"weights": str(weights)})}
    return [f"{section}.init_from={json.dumps(given)}"]


def overrides(set_: list[str] | None, data: Path | None) -> list[str]:
    """All changes to the recipe, in the form of `--set`."""
    import json

    # A local copy has the hub's files but not its revisions.
    local = [] if data is None else [f"data.train={json.dumps(str(data), ensure_ascii=False)}", "data.revision=null"]
    return [*(set_ or []), *local]
