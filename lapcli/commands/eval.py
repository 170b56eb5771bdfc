"""`lap eval`: measure the weights of a run."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lapcli.commands import options
from lapcli.runtime.environment import is_main_process
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.launch import Processes, launch, needs_launch

EXAMPLES = """\b
Examples:
  lap eval vit_digits --tasks top1,top5
  lap eval dino_vits_5L --tasks linear,knn,ade20k --nproc 4
  lap eval quickstart-sft --tasks spelling --limit 20
  lap eval gpt561m_5L-sft --data /data/benchmarks --tasks arc_easy,arc_challenge,mmlu,gsm8k,humaneval
"""


def _option(name: str, help_: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(name, help=help_, metavar=metavar, **more)


def evaluate(
    run: options.Run = None,
    run_option: options.RunOption = None,
    tasks: Annotated[
        str | None, _option("--tasks", "Tasks to run; the default depends on the kind of run.", "A,B")
    ] = None,
    checkpoint: options.Checkpoint = "last",
    batch: Annotated[int | None, _option("--batch", "Examples per forward pass of a process.", min=1)] = None,
    data: Annotated[Path | None, _option("--data", "Local folder to evaluate on, not the run's own data.")] = None,
    limit: Annotated[int | None, _option("--limit", "Only N examples of each task, for a quick look.", min=1)] = None,
    set_: Annotated[
        list[str] | None,
        _option("--set", "Setting of linear, knn, ade20k or sampling, such as sampling.samples=4.", "KEY=VALUE"),
    ] = None,
    protocol: Annotated[
        Literal["paper", "harness"] | None,
        _option("--protocol", "paper: the paper's prompts (default of chat runs); harness: lm-eval's."),
    ] = None,
    seed: Annotated[int | None, _option("--seed", "Seed of sampled answers and few-shot examples.")] = None,
    unsafe_code_execution: Annotated[
        bool, _option("--unsafe-code-execution", "Run generated code WITHOUT a sandbox.")
    ] = False,
    runs_dir: options.RunsDir = None,
    nproc: options.Nproc = "auto",
    as_json: options.Json = False,
) -> None:
    """Evaluate a run: accuracy, probes of features, language benchmarks."""
    from lapcli.evaluation.tasks import evaluated_objectives, new_request
    from lapcli.recipe.section import check_local_file
    from lapcli.runs import named_run, newest_run

    if data is not None:
        check_local_file("--data", str(data))
    where, name, processes = runs_dir or default_runs_dir(), options.one_run(run, run_option), Processes(nproc)
    measured = newest_run(where, set(evaluated_objectives())) if name is None else named_run(where, name)
    request = new_request(
        measured,
        tasks,
        set=set_ or [],
        protocol=protocol,
        seed=seed,
        unsafe_code_execution=unsafe_code_execution,
        data=data,
        limit=limit,
        batch=batch,
    )
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bar, which would be drawn over ours; read when it is loaded

    from lapcli.runtime.progress import say_start

    say_start(f"{measured.path}: loading torch and the model")
    from lapcli.evaluation.run_tasks import evaluate_run, to_text
    from lapcli.objectives.weights import find_checkpoint

    device = measured.recipe.train.device
    weights = find_checkpoint(measured, checkpoint)
    if needs_launch(processes, device):
        # A newer run may exist by the time the processes start.
        more = ["--run", str(measured.path)] if name is None else []
        raise typer.Exit(launch(processes, [*sys.argv[1:], *more], device))

    say_start(f"step {weights.step}, weights sha256 {weights.weights_sha256}")
    evaluation = evaluate_run(request, weights)
    if is_main_process():
        print(json.dumps(evaluation, indent=2) if as_json else to_text(evaluation))
