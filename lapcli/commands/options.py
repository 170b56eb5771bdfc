"""The options that commands share, declared once so that they read the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML recipe, such as recipes/quickstart.yaml.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, such as train.steps=100; repeatable."),
]
Data = Annotated[
    Path | None, typer.Option("--data", help="Local file or folder to read instead of the recipe's source.")
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run; by default the recipe's.")]
RunsDir = Annotated[
    Path | None, typer.Option("--runs-dir", help="Folder of the runs.", envvar="LAP_RUNS", show_default="runs")
]
Seed = Annotated[int | None, typer.Option("--seed", help="The recipe's seed, replaced.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def overrides(set_: list[str] | None, data: Path | None) -> list[str]:
    """All changes to the recipe, in the form of `--set`."""
    import json

    # A local copy has the hub's files but not its revisions.
    local = [] if data is None else [f"data.train={json.dumps(str(data))}", "data.revision=null"]
    return [*(set_ or []), *local]
