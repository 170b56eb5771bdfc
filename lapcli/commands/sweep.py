"""`lap sweep RECIPE --over KEY=A,B`: train a grid of runs, or resume one."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lapcli.commands import options
from lapcli.runtime.devices import GPUS
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes

if TYPE_CHECKING:
    from lapcli.sweep.sweep import Sweep

EXAMPLES = """\b
Examples:
  lap sweep recipes/vitb_cifar100.yaml --over model.laplacian_heads=0,3,6,9,11,12 --over seed=0,1,2 --dry-run
  lap sweep recipes/vit_digits.yaml --over 'model.laplacian_heads=0,4,linear(0, 4)' --then "eval --tasks top1"
  lap sweep recipes/sweeps/cifar100.yaml --jobs 4
  lap sweep recipes/sweeps/laptop.yaml --slurm > laptop.sbatch
"""


def sweep(
    context: typer.Context,
    recipe: options.SweepFile,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", metavar="KEY=A,B", help="Values of a key; with several --over, all combinations."),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            "--then",
            metavar="COMMAND",
            help='Command to run after each training, such as "eval --tasks top1"; repeatable.',
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, max=1024, help="Cells at a time; they share the GPUs. Default: 1.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PATTERN", help="Train only the cells with such names: '*-seed0'.")
    ] = None,
    no_search: Annotated[
        bool, typer.Option("--no-search", help="Skip the search of a sweep file; use the recipe's own values.")
    ] = False,
    set_: options.Set = None,
    data: options.Data = None,
    name: Annotated[str | None, typer.Option("--name", help="Prefix of the runs' names.")] = None,
    runs_dir: options.RunsDir = None,
    nproc: options.Nproc = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid with each cell's cost.")] = False,
    gpu: Annotated[
        Literal["l40", "h100", "a100"] | None,
        typer.Option("--gpu", help="With --dry-run: GPU to estimate hours for; by default this machine."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, max=4096, help="With --dry-run: GPUs for each cell.")
    ] = None,
    track: options.Track = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a SLURM array script instead of running.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train every combination of a grid of values. The same command skips finished cells and resumes the others.

    `lap search` proposes values instead of trying all of them, with a control and a confirmation on fresh seeds.
    """
    from lapcli.runs import check_name
    from lapcli.sweep.state import refuse_others
    from lapcli.sweep.sweep import startable_cells
    from lapcli.tracking import check_installed

    if (gpu or gpus) and not dry_run:
        raise UsageError("--gpu and --gpus belong to --dry-run; a sweep uses this machine's GPUs")
    if slurm and (dry_run or as_json):
        raise UsageError("--slurm prints a script; leave out --dry-run and --json")
    if name is not None:
        check_name(name)
    if nproc != "auto":
        Processes(nproc).here()
    where = runs_dir or default_runs_dir()
    grid = _read(recipe, over, then, options.overrides(set_, data), name, no_search)
    # The parser is handed down, because sweeps are in a layer below the commands.
    grid.check(partial(parse_command, context.find_root().command))
    refuse_others(startable_cells(grid, where, only), where)
    for tracker in track or []:
        check_installed(tracker)
    if dry_run:
        from lapcli.sweep.cost import sweep_cost

        cost = sweep_cost(grid, where, only, GPUS[gpu] if gpu else None, gpus or 1)
        print(cost.to_json() if as_json else cost.to_text())
    elif slurm:
        given = {"--over": over, "--then": then, "--set": set_, "--track": list(map(str, track or []))}
        repeated = [word for option, texts in given.items() for text in texts or [] for word in (option, text)]
        once = {"--data": data, "--name": name, "--runs-dir": where, "--nproc": nproc}
        single = [word for option, value in once.items() if value is not None for word in (option, str(value))]
        arguments = [str(recipe), *repeated, *single, *(["--no-search"] if no_search else [])]
        _print_script(grid, where, only, jobs, arguments, 1 if nproc == "auto" else int(nproc))
    else:
        _run(grid, where, jobs or 1, only, nproc, list(map(str, track or [])), as_json)


def parse_command(command: Any, words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse `lap WORDS` with the command line's own parser; return the command's name and options.

    `command` is the group of `lap` itself.
    """
    from typer.core import TyperGroup
    from typer.exceptions import TyperException

    name = "lap"
    while isinstance(command, TyperGroup):
        context = typer.Context(command)
        named = command.get_command(context, words[0]) if words else None  # commands of plugins are not listed
        if named is None:
            known = ", ".join(command.list_commands(context))
            raise UsageError(f"expected one of {known}, got {words[0] if words else 'nothing'}")
        command, name, words = named, words[0], words[1:]
    try:
        return name, command.make_context(name, words).params
    except TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UsageError(str(message).rstrip(".")) from None


def _read(
    recipe: Path,
    over: list[str] | None,
    then: list[str] | None,
    overrides: list[str],
    name: str | None,
    no_search: bool,
) -> "Sweep":
    from lapcli.sweep.grid import parse_over
    from lapcli.sweep.sweep import sweep_from_file, sweep_from_options
    from lapcli.sweep.sweep_file import load_sweep

    loaded = load_sweep(recipe)
    if loaded is None:
        if no_search:
            raise UsageError("--no-search is for sweep files; leave it out")
        return sweep_from_options(recipe, parse_over(over or []), then or [], overrides, name)
    if over or then:
        raise UsageError(f"{recipe} has its own grid; leave out --over and --then, or copy the file and change it")
    return sweep_from_file(loaded, overrides, name, search=not no_search)


def _print_script(
    grid: "Sweep", where: Path, only: str | None, jobs: int | None, arguments: list[str], gpus: int
) -> None:
    from lapcli.sweep.slurm import array_script
    from lapcli.sweep.state import make_work_folder
    from lapcli.sweep.sweep import known_cells

    make_work_folder(where)  # SLURM does not create the folder of its logs
    cells = known_cells(grid, where, only)
    ready = [cell for cell, waits in cells if not waits]
    print(array_script(ready, arguments, where, jobs, gpus), end="")
    if len(ready) < len(cells):
        count = len(cells) - len(ready)
        print(f"lap: these are the search's cells; run this again after them for the other {count}", file=sys.stderr)
    if grid.reports:
        print("lap: when all cells are finished, the same command without --slurm makes the report", file=sys.stderr)


def _run(grid: "Sweep", where: Path, jobs: int, only: str | None, nproc: str, track: list[str], as_json: bool) -> None:

    from lapcli.runtime.progress import LogConsole, say_start
    from lapcli.sweep.output import LiveTable, as_data, failure, final_table, make_reports
    from lapcli.sweep.runner import Runner, share_machine, visible_gpus

    say_start(f"{grid.name} is checked; looking for GPUs")
    slots, words = share_machine(jobs)
    console = LogConsole()
    with LiveTable(console, where) as table:
        table.tell(words)
        runner = Runner(grid, where, slots, only=only, nproc=nproc, track=track, show=table.show, tell=table.tell)
        # Every cell would be refused for the same reason, after it has loaded torch.
        if (gpus := visible_gpus()) and any(status.cell.loaded.train.device != "cpu" for status in runner.statuses):
            Processes(nproc).check_gpus(max(1, len(gpus) // jobs))
        outcome = runner.run()
    if as_json:
        chosen = {choice.cell: dict(choice.values) for choice in outcome.choices}
        print(json.dumps({"cells": as_data(outcome.statuses, where), "chosen": chosen}, indent=2))
    else:
        print(final_table(outcome.statuses, where))
    for note in outcome.notes():
        print(f"lap: {note}", file=sys.stderr)
    code = 0
    # With --only, as in every task of a SLURM array, other cells may not be trained yet.
    if only is None:
        code = make_reports(grid, outcome.statuses, where, to_stderr=as_json)
    if error := failure(outcome):
        raise error
    if code:
        raise typer.Exit(code)
