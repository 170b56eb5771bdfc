"""`lap eval`: measure the weights of a run."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.commands import options
from lapcli.runtime.environment import is_main_process
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes, launch, needs_launch
from lapcli.runtime.tables import facts

if TYPE_CHECKING:
    from lapcli.evaluation.run_tasks import Evaluation

EXAMPLES = """\b
Examples:
  lap eval vit_digits --tasks top1,top5
  lap eval dino_vits_5L --tasks linear,knn,ade20k --nproc 4
  lap eval quickstart-sft --tasks spelling --limit 20 --show-prompt 1
  lap eval gpt561m_5L-sft --data /data/benchmarks --tasks arc_easy,arc_challenge,mmlu,gsm8k,humaneval
"""


def evaluate(
    run: options.Run = None,
    run_option: options.RunOption = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="A,B", help="Tasks to run; the default depends on the kind of run."),
    ] = None,
    checkpoint: options.Checkpoint = "last",
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Examples per forward pass of a process.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Local folder to evaluate on instead of the run's own data.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use only N examples of each task, for a quick look.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="timm:NAME", help="Evaluate a stock timm ViT instead of a run.")
    ] = None,
    weights_file: Annotated[
        Path | None, typer.Option("--weights", help="Weights of --model; by default the hub's.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of linear, knn or ade20k, such as linear.steps=500."),
    ] = None,
    holdout: Annotated[
        bool, typer.Option("--holdout", help="Choose the learning rate of linear on held-out training images.")
    ] = False,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            metavar="paper|harness",
            help="paper: the paper's prompts (default of chat runs); harness: lm-eval's.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Answers to each question of gsm8k, humaneval, spelling.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="Sampling temperature of these answers.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the K likeliest tokens.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of sampled answers and few-shot examples.")] = None,
    show_prompt: Annotated[
        int | None, typer.Option("--show-prompt", min=1, metavar="N", help="Print the first N prompts of each task.")
    ] = None,
    samples_out: Annotated[
        Path | None, typer.Option("--samples-out", help="File for every prompt, answer and verdict, as jsonl.")
    ] = None,
    unsafe_code_execution: Annotated[
        bool, typer.Option("--unsafe-code-execution", help="Run generated code WITHOUT a sandbox.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore saved answers and evaluate again.")] = False,
    runs_dir: options.RunsDir = None,
    nproc: Annotated[
        str, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine; auto: one per GPU.")
    ] = "auto",
    as_json: options.Json = False,
) -> None:
    """Evaluate a run: accuracy, probes of features, language benchmarks."""
    from lapcli.evaluation.families import STOCK, choose, evaluated_objectives
    from lapcli.runs import named_run, newest_run

    given: dict[str, Any] = {
        "protocol": protocol,
        "samples": samples,
        "temperature": temperature,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "show_prompt": show_prompt,
        "samples_out": samples_out,
        "unsafe_code_execution": unsafe_code_execution,
        "fresh": fresh,
        "set": set_ or None,
        "holdout": holdout,
    }
    where = runs_dir or default_runs_dir()
    run = options.one_run(run, run_option)
    processes = Processes(nproc)
    if model is not None:
        if run is not None or checkpoint != "last":
            raise UsageError("--model is measured instead of a run; leave out RUN and --checkpoint, or --model")
        choose(STOCK, tasks, given, data)
        if needs_launch(processes):
            raise typer.Exit(launch(processes, sys.argv[1:]))
        from lapcli.evaluation.run_tasks import evaluate_model

        evaluation = evaluate_model(model, weights_file, where, tasks, batch, data, limit, given)
        if is_main_process():
            _print(evaluation, as_json)
        return
    if weights_file is not None:
        raise UsageError("--weights belongs to --model timm:NAME; choose a run's weights with --checkpoint")
    evaluated = newest_run(where, set(evaluated_objectives())) if run is None else named_run(where, run)
    choose(evaluated.recipe.objective, tasks, given, data)

    from lapcli.runtime.progress import say_start

    say_start(f"{evaluated.path}: loading torch and the model")

    from lapcli.evaluation.run_tasks import evaluate_run
    from lapcli.objectives.loading import find_checkpoint

    weights = find_checkpoint(evaluated, checkpoint)
    if needs_launch(processes, evaluated.recipe.train.device):
        # The newest run may be another one by the time the processes start.
        arguments = sys.argv[1:] if run is not None else [*sys.argv[1:], "--run", str(evaluated.path)]
        raise typer.Exit(launch(processes, arguments, evaluated.recipe.train.device))

    if is_main_process():
        shown = f"{evaluated.path}, step {weights.step}, weights sha256 {weights.weights_sha256}"
        print(shown, file=sys.stderr)
    evaluation = evaluate_run(evaluated, tasks, checkpoint, batch, data, limit, given)
    if is_main_process():
        _print(evaluation, as_json)


def _print(evaluation: "Evaluation", as_json: bool) -> None:

    if as_json:
        print(json.dumps(evaluation.to_dict(), indent=2))
        return
    if evaluation.limit is not None:
        print(f"only {evaluation.limit:,} examples of each task (--limit)")
    for line in evaluation.table():
        print(line)

    lines = [
        ("run" if evaluation.run else "model", evaluation.subject),
        ("weights", f"sha256 {evaluation.weights_sha256}"),
        *evaluation.measured.notes.items(),
        ("data", evaluation.measured.data),
        ("", f"sha256 {evaluation.measured.data_sha256}"),
        ("written to", str(evaluation.path)),
    ]
    print("\n" + facts([(f"{name:<11}", text) for name, text in lines]))
