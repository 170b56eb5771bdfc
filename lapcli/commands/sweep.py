"""`lap sweep RECIPE --over KEY=A,B`: train a grid of runs, or resume one."""

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from lapcli.commands import options
from lapcli.commands.options import print_json, table
from lapcli.runtime.devices import named_gpu
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.files import check_room
from lapcli.runtime.launch import Processes

if TYPE_CHECKING:
    from lapcli.experiments.sweep import Sweep

EXAMPLES = """\b
Examples:
  lap sweep recipes/vitb_cifar100.yaml --over model.laplacian_heads=0,3,6,9,11,12 --over seed=0,1,2 --dry-run
  lap sweep recipes/vit_digits.yaml --over 'model.laplacian_heads=0,4,linear(0, 4)' --then "eval --tasks top1"
  lap sweep recipes/sweeps/cifar100.yaml --jobs 4
  lap sweep recipes/sweeps/laptop.yaml --slurm > laptop.sbatch
"""
THEN = ("eval", "analyze", "sft")  # commands that may follow a run


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
            "--then", metavar="COMMAND", help='Command after each training, such as "eval --tasks top1"; repeatable.'
        ),
    ] = None,
    jobs: options.Jobs = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="PATTERN", help="Train only the cells that match, such as '*-seed0'."),
    ] = None,
    no_tune: Annotated[
        bool, typer.Option("--no-tune", help="Skip `tune` of a sweep file; use the recipe's own values.")
    ] = False,
    set_: options.Set = None,
    data: options.Data = None,
    name: Annotated[str | None, typer.Option("--name", help="Prefix of the runs' names.")] = None,
    runs_dir: options.RunsDir = None,
    nproc: options.Nproc = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid and the cost of each cell.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="With --dry-run: GPU to estimate hours for, as `lap plan` names it."
        ),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a SLURM array script instead of running.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train every combination of a grid of values. The same command skips finished cells and resumes the others.

    `lap search` proposes values instead of trying all of them, with a control and a confirmation on fresh seeds.
    """
    from lapcli.experiments import runner
    from lapcli.experiments.cells import make_work_folder, parse_over, refuse_others
    from lapcli.experiments.slurm import array_script
    from lapcli.experiments.sweep import SweepChooser, disk_left, known_cells, load_sweep, sweep_cost
    from lapcli.runs import check_name
    from lapcli.runtime.progress import LogConsole

    if gpu and not dry_run:
        raise UsageError("--gpu belongs to --dry-run; a sweep uses this machine's GPUs")
    if slurm and (dry_run or as_json):
        raise UsageError("--slurm prints a script; leave out --dry-run and --json")
    if name is not None:
        check_name(name)
    if nproc != "auto":
        Processes(nproc).here()
    where, overrides = runs_dir or default_runs_dir(), options.overrides(set_, data)
    grid = load_sweep(recipe, overrides, name, over=parse_over(over or []), then=then or [], tune=not no_tune)
    grid.check()
    lap = context.find_root().command
    _check_commands(grid, lap)
    known = known_cells(grid, where, only)
    refuse_others([cell for cell, waits in known if not waits], where)
    if dry_run:
        cost = sweep_cost(known, where, named_gpu(gpu) if gpu else None)
        print_json(cost) if as_json else print(_cost_table(cost))
        return
    if slurm:
        given = {"--over": over, "--then": then, "--set": set_}
        once = {"--data": data, "--name": name, "--runs-dir": where, "--nproc": nproc}
        given |= {option: [str(value)] for option, value in once.items() if value is not None}
        words = [word for option, texts in given.items() for text in texts or [] for word in (option, text)]
        make_work_folder(where)  # SLURM does not create the folder of its logs
        words = [str(recipe), *words, *(["--no-tune"] if no_tune else [])]
        ready = [cell for cell, waits in known if not waits]
        print(array_script(ready, words, where, jobs, 1 if nproc == "auto" else int(nproc)), end="")
        if len(ready) < len(known):
            print("lap: these cells tune the others; run this again after them for the rest", file=sys.stderr)
        return
    slots, shares = runner.share_machine(jobs or 1)
    # Otherwise every cell would be refused for the same reason, after loading torch.
    if (here := runner.visible_gpus()) and any(cell.loaded.train.device != "cpu" for cell, _ in known):
        Processes(nproc).check(max(1, len(here) // (jobs or 1)))
    check_room(where, disk_left(known, where), "the checkpoints of all cells", "lower checkpoint.keep")
    console = LogConsole()
    tell = console.print
    tell(shares)
    chooser = SweepChooser(grid, where, only, tell)
    statuses = runner.Runner(chooser, where, slots, nproc=nproc, tell=tell, console=console).run()
    if not statuses:
        raise UsageError(f"the cells called {only} wait until the sweep is tuned; run it without --only first")
    if as_json:
        print_json({"cells": runner.as_data(statuses, where), "chosen": chooser.chosen})
    else:
        print(runner.final_table(statuses, where))
    for waiting in chooser.undecided:
        tell(f"lap: the grid of {waiting.prefix} waits until all runs that tune it are finished")
    # With --only, as in every task of a SLURM array, other cells may not be trained yet.
    names = runner.report_names(statuses, where) if only is None else []
    for text in grid.reports if names else ():
        made = _parsed(lap, ["report", *names, *shlex.split(text), "--runs-dir", str(where)])
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout), made:
            made.command.invoke(made)
    if error := runner.failure(statuses):
        raise error


def _parsed(command: Any, words: list[str]) -> Any:
    """Parse `lap WORDS` with the command line's own parser, `command`; return the command's context."""
    name = "lap"
    try:
        while isinstance(command, TyperGroup):
            context = typer.Context(command)
            command, name, words = command.resolve_command(context, words)[1], words[0], words[1:]
        return command.make_context(name, words)
    except TyperException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UsageError(str(message).rstrip(".")) from None


def _check_commands(grid: "Sweep", lap: Any) -> None:
    """Find commands of `then` and `report` that do not exist, unknown options, and tasks that do not fit the runs."""
    from lapcli.evaluation.tasks import chosen_tasks
    from lapcli.recipe import Problem, RecipeError

    problems = []
    commands = [(part.place("then", n), text, part) for part in grid.grids for n, text in enumerate(part.then)]
    for place, text, part in [*commands, *((grid.report_place, f"report {text}", None) for text in grid.reports)]:
        try:
            words = shlex.split(part.cells()[0].then[part.then.index(text)] if part else text)
            if words[0] not in (THEN if part else ("report",)):
                raise UsageError(f"expected a command among {', '.join(THEN)}")
            # --runs-dir is added by the runner; --help would make the command succeed without doing anything.
            if {"--help", "-h", "--runs-dir"} & set(words):
                raise UsageError("--help and --runs-dir have no effect here; leave them out")
            given = _parsed(lap, words).params
            # The chat stages of a run have the tasks of another objective.
            if part and words[0] == "eval" and "{run}" not in text and given.get("tasks"):
                chosen_tasks(part.cells()[0].loaded.objective, given["tasks"])
        except (LapError, ValueError) as error:
            problems.append(Problem(place, text.split()[0], f"{error}, in {text[:100]!r}"))
    if problems:
        raise RecipeError(grid.name, problems)


def _cost_table(cost: dict[str, Any]) -> str:
    rows = []
    for row in [*cost["cells"], {"cell": "in all", "state": "", "steps": None, **cost}]:
        numbers = {"steps": ",", "flops": ".3e", "flops_left": ".3e", "hours_left": ",.1f"}
        shown = ["-" if row[key] is None else format(row[key], form) for key, form in numbers.items()]
        rows.append((row["cell"], row["state"], *shown))
    left = sum(cell["state"] != "finished" for cell in cost["cells"])
    lines = table(("cell", "state", "steps", "FLOPs", "FLOPs left", "hours left"), rows)
    return f"{lines}\n\n{len(cost['cells'])} cells, {left} to do; hours on {cost['devices']}, estimated"
