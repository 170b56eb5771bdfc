"""`lap eval`: measure the weights of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lapcli.commands import options

if TYPE_CHECKING:
    from lapcli.evaluation.run_tasks import Evaluation

EXAMPLES = """\b
Examples:
  lap eval
  lap eval --run vit_digits --tasks top1,top5
  lap eval --run vitb_cifar100_12L --checkpoint best --json
  lap eval --run vitb_imagenet_3L --data /data/imagenet --nproc 4
"""


def evaluate(
    run: Annotated[
        str | None, typer.Option("--run", help="Name or folder of a run; by default the newest finished one.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="A,B", help="What to measure; by default all of the run's kind.")
    ] = None,
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="last, best, or a step that was kept.")] = "last",
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Examples a process takes at once.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Local folder to evaluate on, not the run's own.")] = None,
    runs_dir: options.RunsDir = None,
    nproc: Annotated[str, typer.Option("--nproc", metavar="N|auto", help="Processes here; auto: one a GPU.")] = "auto",
    as_json: options.Json = False,
) -> None:
    """Measure a run's weights on every example of its held-out data."""
    from lapcli.environment import runs_dir as default_runs_dir
    from lapcli.evaluation.run_tasks import evaluate_run, find_run, find_weights
    from lapcli.evaluation.tasks import chosen_tasks
    from lapcli.launch import Processes, launch, needs_launch

    found = find_run(runs_dir or default_runs_dir(), run)
    chosen_tasks(found.recipe.objective, tasks)
    weights = find_weights(found, checkpoint)
    processes = Processes(nproc)
    if needs_launch(processes, found.recipe.train.device):
        arguments = sys.argv[1:] if run is not None else [*sys.argv[1:], "--run", str(found.path)]
        raise typer.Exit(launch(processes, arguments, found.recipe.train.device))

    from lapcli.training.distributed import is_main_process

    if is_main_process():
        shown = f"{found.path}, step {weights.step}, weights sha256 {weights.weights_sha256}"
        print(shown, file=sys.stderr)
    evaluation = evaluate_run(found, tasks, checkpoint, batch, data)
    if is_main_process():
        _print(evaluation, as_json)


def _print(evaluation: "Evaluation", as_json: bool) -> None:
    import json

    if as_json:
        print(json.dumps(evaluation.to_dict(), indent=2))
        return
    print(f"{'task':<12}{'value':>9}{'95% interval':>20}{'examples':>11}")
    for score in evaluation.scores:
        low, high = score.interval
        interval = f"{low:.2%} - {high:.2%}"
        print(f"{score.task:<12}{score.value:>9.2%}{interval:>20}{score.count:>11,}")
    print(f"\nrun          {evaluation.run.path}, step {evaluation.step}")
    print(f"weights      sha256 {evaluation.weights_sha256}")
    print(f"data         {evaluation.data}")
    print(f"             sha256 {evaluation.data_sha256}")
    print(f"kept in      {evaluation.path}")
