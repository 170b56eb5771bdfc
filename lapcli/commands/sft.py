"""`lap sft RECIPE`: fine-tune a pretrained GPT for chat, or resume an interrupted stage."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lapcli.commands import options
from lapcli.commands.train import print_summary
from lapcli.runtime.devices import prepare_determinism
from lapcli.runtime.environment import STEP_TIMEOUT, is_main_process, require_extra
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes, launch, needs_launch

if TYPE_CHECKING:
    from lapcli.recipe.schema import InitFrom
    from lapcli.runs import Run

#: Objectives of the runs that a stage can start from, without and with --run.
PRETRAINED = {"language_model"}
STARTS = {"language_model", "chat"}

EXAMPLES = """\b
Examples:
  lap sft recipes/chat_quickstart.yaml --run quickstart
  lap sft recipes/chat561m.yaml --run gpt561m_5L --nproc 8 --set stages.midtrain=null
  lap sft recipes/chat561m.yaml --init-from run:gpt561m_5L@10000 --name my_chat
  lap sft recipes/chat561m.yaml --dry-run
"""


def sft(
    recipe: options.ChatRecipeFile,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", autocompletion=options.run_names, help="Pretrained run; by default the newest finished one."
        ),
    ] = None,
    init_from: options.InitFrom = None,
    set_: options.Set = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with copies of the recipe's data sets, by name.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="The runs are NAME-midtrain and NAME-sft; by default the name of the pretrained run."
        ),
    ] = None,
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
    """Mid-train and fine-tune a pretrained GPT on conversations. The same command resumes an unfinished run."""
    from lapcli.data.chat.mixture import count_stage, counts_as_text
    from lapcli.recipe.chat import ChatRecipe
    from lapcli.recipe.schema import InitFrom
    from lapcli.recipe.section import check_local_files
    from lapcli.runs import INFO, check_start, find_run

    loaded = options.load_with_data(recipe, set_, data, seed)
    if not isinstance(loaded, ChatRecipe):
        raise UsageError(f"{recipe} has no stages; it is trained by `lap train {recipe}`")
    given = InitFrom(source=init_from) if init_from is not None else loaded.init_from
    if run is not None and given is not None:
        raise UsageError(f"the stages start from --run {run} or from {given.source}, not from both; leave one out")
    if any(stage.train.deterministic for stage in loaded.stages.given().values()):
        prepare_determinism()  # before torch is imported
    processes = Processes(nproc, nnodes, node_rank, rdzv, max_restarts)
    if dry_run:
        processes.check()
        counts = {name: count_stage(stage) for name, stage in loaded.stages.given().items()}
        print("\n\n".join(counts_as_text(name, count) for name, count in counts.items()))
        return
    from lapcli.runtime.progress import say_start

    for tracker in loaded.track:
        require_extra(tracker, tracker)
    folder = runs_dir or default_runs_dir()
    start = find_run(folder, run, PRETRAINED if run is None else STARTS) if given is None else None
    run_name = name or _name_of(start, given) + ("" if seed is None else f"-seed{seed}")
    if fresh or not any((folder / f"{run_name}-{each}" / INFO).is_file() for each in loaded.stages.given()):
        check_local_files(loaded)
        if given is not None:
            check_start(given.source, folder)
    say_start(f"{recipe.name} is valid; loading torch")
    device = next(iter(loaded.stages.given().values())).train.device
    if needs_launch(processes, device):
        # A newer run may exist by the time the processes start.
        named = ["--run", str(start.path.resolve())] if start is not None and run is None else []
        raise typer.Exit(launch(processes, [*sys.argv[1:], *named], device))

    from lapcli.runtime.progress import LogConsole
    from lapcli.tracking import LiveTracking
    from lapcli.training.stages import train_stages

    start_from = start or given
    assert start_from is not None
    console = LogConsole()
    with LiveTracking(loaded.track, console.warn):
        runs = train_stages(
            loaded,
            start_from,
            runs_dir=folder,
            name=run_name,
            fresh=fresh,
            step_timeout=step_timeout,
            console=console,
        )
    if is_main_process():
        _print_result(runs)


def _name_of(start: "Run | None", given: "InitFrom | None") -> str:
    from lapcli.recipe.schema import RUN

    if start is not None:
        # A stage that starts from NAME-midtrain is NAME-sft, as if both stages had been trained by one command.
        return start.name.removesuffix("-midtrain")
    assert given is not None
    if not given.source.startswith(RUN):
        raise UsageError(f"name the runs that start from {given.source} with --name")
    return Path(given.source.removeprefix(RUN).partition("@")[0]).name


def _print_result(runs: "list[Run]") -> None:
    from lapcli.runs import read_summary

    for run in runs:
        print_summary(run, read_summary(run))
    print("\nNext:")
    print(f"  lap chat {runs[-1].name}{options.runs_dir_option(runs[-1].path.parent)}")
