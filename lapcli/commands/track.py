"""`lap track`: mirror runs in TensorBoard or Weights & Biases."""

import sys
from typing import Annotated, Literal

import typer

from lapcli.commands import completion, options

EXAMPLES = """\b
Examples:
  lap track quickstart --to tensorboard
  lap track 'vit_*' --to wandb --project laplacian --offline
  lap track quickstart --to tensorboard --follow
"""


def track(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS", autocompletion=completion.runs, help="Names, folders or patterns of runs, of any status."
        ),
    ],
    to: Annotated[Literal["tensorboard", "wandb"], typer.Option("--to", help="The tracker.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until no run is being trained any more.")] = False,
    project: Annotated[str, typer.Option("--project", help="Project of W&B.")] = "lap",
    offline: Annotated[
        bool, typer.Option("--offline", help="W&B: write folders for `wandb sync` and send nothing.")
    ] = False,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Mirror metrics, samples, evaluations, figures and recipes of runs: each step once, however often it is called."""
    from lapcli.catalogue.listing import matching_runs
    from lapcli.commands.printing import print_json
    from lapcli.runtime.environment import runs_dir as default_runs_dir
    from lapcli.runtime.errors import UsageError
    from lapcli.tracking.mirror import mirror
    from lapcli.tracking.trackers import TensorBoard, WandB

    if to != "wandb" and (offline or project != "lap"):
        raise UsageError(f"--project and --offline are options of --to wandb; leave them out for {to}")
    paths = matching_runs(runs_dir or default_runs_dir(), runs)
    tracker = WandB(project, offline) if to == "wandb" else TensorBoard()
    if follow:
        print(f"following {', '.join(path.name for path in paths)}; Ctrl-C ends", file=sys.stderr)
    sent = mirror(paths, tracker, follow=follow)
    if as_json:
        print_json([vars(one) for one in sent])
        return
    for one in sent:
        print(f"{one.run}: {one.steps:,} steps and {one.items:,} other items sent to {to}")
