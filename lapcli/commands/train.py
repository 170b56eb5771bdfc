"""`lap train RECIPE`: train a model, or resume an interrupted run."""

import os
import shlex
import sys
from typing import TYPE_CHECKING

import typer

from lapcli.commands import options
from lapcli.runtime.devices import prepare_determinism
from lapcli.runtime.environment import STEP_TIMEOUT, is_main_process, require_extra
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes, launch, needs_launch

if TYPE_CHECKING:
    from lapcli.recipe import BaseRecipe
    from lapcli.runs import Run

EXAMPLES = """\b
Examples:
  lap train recipes/quickstart.yaml
  lap train recipes/quickstart.yaml --set 'model.laplacian_heads=linear(0, 4)' --name schedule
  lap train recipes/gpt_continue.yaml --init-from run:quickstart --data my_text.txt
  lap train gpt561m_5L --nproc 8 --max-restarts 3
"""


def train(
    recipe: options.Recipe,
    set_: options.Set = None,
    data: options.Data = None,
    init_from: options.InitFrom = None,
    name: options.Name = None,
    runs_dir: options.RunsDir = None,
    seed: options.Seed = None,
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
    nproc: options.Nproc = "auto",
    nnodes: options.Nnodes = "1",
    node_rank: options.NodeRank = None,
    rdzv: options.Rdzv = None,
    max_restarts: options.MaxRestarts = 0,
    step_timeout: options.StepTimeout = STEP_TIMEOUT,
) -> None:
    """Train a model, or resume its run. The same command resumes an unfinished run from its last checkpoint.

    A resumed run is bit for bit the same as an uninterrupted one with as many processes: always on the CPU, and on
    CUDA with --set train.deterministic=true.
    """
    from lapcli.recipe import BaseRecipe, load_recipe
    from lapcli.recipe.section import check_local_files
    from lapcli.runs import INFO, check_name, check_start
    from lapcli.runtime.progress import say_start

    run_name = name if name is not None else (recipe.stem if seed is None else f"{recipe.stem}-seed{seed}")
    loaded = load_recipe(recipe, [*options.overrides(set_, data), *options.init_from(init_from)], seed)
    if not isinstance(loaded, BaseRecipe):
        raise UsageError(f"{recipe} has stages; they are trained by `lap sft {recipe}`")
    check_name(run_name)
    if loaded.train.deterministic:
        prepare_determinism()  # before torch is imported
    processes = Processes(nproc, nnodes, node_rank, rdzv, max_restarts)
    device = loaded.train.device
    if dry_run:
        from lapcli.planning import plan_training

        processes.check()
        if loaded.train.init_from is not None:
            check_start(loaded.train.init_from.source, runs_dir or default_runs_dir())
        plan = plan_training(loaded, processes.here(device) * processes.machines[-1])
        print(plan.to_text())
        return
    folder = runs_dir or default_runs_dir()
    if fresh or not os.path.isfile(folder / run_name / INFO):  # a run resumes from its checkpoint, or is finished
        check_local_files(loaded)
        if loaded.train.init_from is not None:
            check_start(loaded.train.init_from.source, folder)
    for tracker in loaded.track:
        require_extra(tracker, tracker)
    say_start(f"{recipe.name} is valid; loading torch")
    if needs_launch(processes, device):
        _check_machines(processes, loaded, device)
        # The ranks parse the same words again; `needs_launch` is false for them, since torchrun has set RANK.
        raise typer.Exit(launch(processes, sys.argv[1:], device))

    from lapcli.runtime.progress import LogConsole
    from lapcli.tracking import LiveTracking
    from lapcli.training.train import train_recipe

    console = LogConsole()
    with LiveTracking(loaded.track, console.warn):
        run = train_recipe(
            loaded,
            runs_dir=folder,
            name=run_name,
            fresh=fresh,
            step_timeout=step_timeout,
            console=console,
        )
    if is_main_process():
        _print_result(run)


def _check_machines(processes: Processes, recipe: "BaseRecipe", device: str) -> None:
    """Refuse a global batch that does not divide among every allowed number of machines, before one is lost."""
    from lapcli.objectives import objective_of

    objective, here = objective_of(recipe)(recipe), processes.here(device)
    for machines in processes.machines if processes.is_elastic else ():
        try:
            objective.plan_batches(machines * here)
        except UsageError as error:
            raise UsageError(f"--nnodes {processes.nnodes}: with {machines} machines {error}") from None


def _print_result(run: "Run") -> None:
    """Print the scores, the samples, the folder of the run and the next commands to try."""
    from lapcli.recipe.schema import TransformerModel
    from lapcli.runs import read_summary

    summary = read_summary(run)
    print_summary(run, summary)
    print("\nNext:")
    where, folder, commands = options.runs_dir_option(run.path.parent), shlex.quote(str(run.path)), {}
    if "best_step" in summary:
        what = f"accuracy with its interval; --checkpoint best: step {summary['best_step']}"
        commands[f"lap eval {run.name}{where}"] = what
    commands[f"lap analyze all {run.name}{where}"] = "the paper's measurements and figures of its tokens"
    model = getattr(run.recipe, "model", None)
    if isinstance(model, TransformerModel) and model.head_plan().counts():
        plain = "model.laplacian_heads=0" if model.operators is None else "model.operators=null"
        commands[f"lap train {folder}/recipe.yaml --set {plain} --name {run.name}-0L{where}"] = "the baseline"
    for command, what in commands.items():
        print(f"  {command}\n      {what}")


def print_summary(run: "Run", summary: dict) -> None:
    """Print that a run is finished, its validations at the end and the start, and its samples."""
    weights = str(run.info.get("weights_sha256"))[:16]
    print(f"\n{run.path} is finished: {run.info['step']:,} steps, weights sha256 {weights}")
    start = summary.get("start", {})
    for key, value in summary.get("end", {}).items():
        change = f"   from {start[key]:.4f} ({value / start[key] - 1:+.0%})" if start.get(key) else ""
        print(f"  {key.replace('_', ' '):<34}{value:.4f}{change}")
    for sample in summary.get("samples", []):
        print(f"  sample: [{sample['prompt']}]{sample['continuation']}".replace("\n", "\n    "))
