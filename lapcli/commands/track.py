"""`lap track`: send runs to TensorBoard, Weights & Biases or trackio."""

from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.commands.options import print_json
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError

EXAMPLES = """\b
Examples:
  lap track quickstart --to tensorboard
  lap track 'vit_*' --to wandb --project laplacian --offline
"""


def track(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS", autocompletion=options.run_names, help="Names, folders or patterns of runs, of any status."
        ),
    ],
    to: Annotated[Literal["tensorboard", "wandb", "trackio"], typer.Option("--to", help="The tracker.")],
    project: Annotated[
        str | None, typer.Option("--project", help="Project of W&B or trackio.", show_default="lap")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="W&B: write folders for `wandb sync` and send nothing.")
    ] = False,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Send metrics, evaluations and recipes of runs to TensorBoard, W&B or trackio."""
    if offline and to != "wandb":
        raise UsageError(f"--offline is an option of --to wandb; leave it out for {to}, which sends nothing anyway")
    if project is not None and to == "tensorboard":
        raise UsageError("--project is an option of --to wandb and --to trackio; leave it out for tensorboard")
    if project is not None and not project.strip():
        raise UsageError("--project is empty; give a name, or leave it out for lap")

    from lapcli.catalogue.listing import matching_runs
    from lapcli.runs import read_run
    from lapcli.tracking import replay

    paths = matching_runs(runs_dir or default_runs_dir(), runs)
    sent = {path.name: replay(read_run(path), to, project, offline) for path in paths}
    if as_json:
        print_json([{"run": name, "steps": steps} for name, steps in sent.items()])
        return
    for name, steps in sent.items():
        print(f"{name}: {steps:,} steps sent to {to}")
