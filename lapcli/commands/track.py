"""`lap track`: mirror runs in TensorBoard, Weights & Biases or trackio."""

import sys
from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.commands.options import print_json
from lapcli.runtime.environment import runs_dir as default_runs_dir

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
            metavar="RUNS", autocompletion=options.run_names, help="Names, folders or patterns of runs, of any status."
        ),
    ],
    to: Annotated[Literal["tensorboard", "wandb", "trackio"], typer.Option("--to", help="The tracker.")],
    follow: Annotated[bool, typer.Option("--follow", help="Continue until no run is being trained any more.")] = False,
    project: Annotated[
        str | None, typer.Option("--project", help="Project of W&B or trackio.", show_default="lap")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="W&B: write folders for `wandb sync` and send nothing.")
    ] = False,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Mirror runs in TensorBoard, W&B or trackio.

    Metrics, samples, evaluations, figures and recipes are sent, each step once, however often the command is called.
    """
    from lapcli.catalogue.listing import matching_runs
    from lapcli.tracking.mirror import mirror
    from lapcli.tracking.trackers import tracker_of

    tracker = tracker_of(to, project, offline)
    paths = matching_runs(runs_dir or default_runs_dir(), runs)
    if follow:
        print(f"following {', '.join(path.name for path in paths)}; Ctrl-C ends", file=sys.stderr)
    sent = mirror(paths, tracker, follow=follow)
    if as_json:
        print_json([vars(one) for one in sent])
        return
    for one in sent:
        print(f"{one.run}: {one.steps:,} steps and {one.items:,} other items sent to {to}")
