"""`lap ladder LADDER.yaml`: compare arms over several sizes, and report whether they help and with what certainty."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lapcli.commands import options
from lapcli.commands.options import print_json, table
from lapcli.runtime.devices import named_gpu
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.files import check_room

EXAMPLES = """\b
Examples:
  lap ladder ladders/gpt_cpu --data docs.jsonl.gz
  lap ladder ladders/gpt_gpu --dry-run --gpu l40
  lap ladder ladders/gpt_gpu --budget 24h --gpu l40 --target d20 --jobs 4
  lap ladder --validate
Several of the same command share the work, as the tasks of a SLURM array do: each cell is trained by one of them.
"""


def ladder(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="LADDER", autocompletion=options.recipe_names, help="A file, or ladders/gpt_cpu."),
    ] = None,
    arms: Annotated[
        str | None, typer.Option("--arms", metavar="A,B", help="Only these arms; the baseline is always run.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="RUNG|FLOPS", help="Scale at which to predict the difference.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="24h", help="Skip the rungs that would exceed this time.")
    ] = None,
    jobs: options.Jobs = None,
    set_: options.Set = None,
    data: options.Data = None,
    runs_dir: options.RunsDir = None,
    nproc: options.Nproc = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print runs, hours, disk use and detectable difference.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="GPU to estimate hours for, as of lap plan; default: this machine."),
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Test the statistics on simulated ladders with a known truth.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare arms with a baseline over several sizes: does a change help, and does it still help at a larger scale?"""
    from lapcli.recipe import find_recipe

    path = find_recipe(file) if file else None  # a misspelt name is refused before torch is loaded
    from lapcli.experiments import runner
    from lapcli.experiments.cells import refuse_others
    from lapcli.experiments.ladder import Ladder, LadderChooser
    from lapcli.experiments.verdicts import answer, target_compute
    from lapcli.runtime.progress import LogConsole

    if validate:
        source = context.get_parameter_source("runs_dir")
        is_given = runs_dir and source is not None and source.name == "COMMANDLINE"  # not by LAP_RUNS
        if path or arms or target or budget or jobs or set_ or data or is_given or gpu or dry_run or nproc != "auto":
            raise UsageError("--validate only simulates ladders; leave out the file and the other options")
        _validate(as_json)
        return
    if path is None:
        raise UsageError("name a ladder file, such as ladders/gpt_cpu, or give --validate")
    where = runs_dir or default_runs_dir()
    chosen = [name.strip() for name in arms.split(",")] if arms else []
    climbed = Ladder(path, where, options.overrides(set_, data), chosen)
    target_compute(climbed, target)
    device = named_gpu(gpu) if gpu else None
    console = LogConsole()
    tell = console.print
    if budget is not None:
        tell(climbed.keep_within(_hours(budget), device))
    refuse_others([each.cell for each in climbed.planned()], where)
    if dry_run or not climbed.is_finished:
        cost = climbed.cost(device)
        if dry_run:
            print_json(cost) if as_json else print(_cost_table(cost))
            return
        print(_cost_table(cost), file=sys.stderr)
        left = sum(rung["disk"] * rung["runs_left"] / max(1, rung["runs"]) for rung in cost["rungs"])
        check_room(where, left, "the checkpoints of all runs", "lower checkpoint.keep")
    slots, shares = runner.share_machine(jobs or 1)
    tell(shares)
    statuses = runner.Runner(LadderChooser(climbed), where, slots, nproc=nproc, tell=tell, console=console).run()
    if error := runner.failure(statuses):
        raise error
    told = answer(climbed, target)
    print_json(told) if as_json else print(told["text"])


def _hours(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    try:
        return float(number) * {"h": 1.0, "d": 24.0, "m": 1 / 60}[unit]
    except (ValueError, KeyError):
        raise UsageError(f"--budget {text[:20]!r}: expected hours, days or minutes such as 24h, 2d or 90m") from None


def _cost_table(cost: dict[str, Any]) -> str:
    forms = {"runs_left": ",", "steps": ",", "flops": ".2e", "hours_left": ",.1f", "disk": ",.2f", "visible": ".4f"}
    total = {key: sum(rung[key] or 0 for rung in cost["rungs"]) for key in ("runs_left", "hours_left", "disk")}
    rows = []
    for rung in [*cost["rungs"], {"rung": "in all", **total}]:
        shown = {**rung, "disk": rung["disk"] / 1e9}
        rows.append([rung["rung"], *("-" if shown.get(k) is None else format(shown[k], f) for k, f in forms.items())])
    names = ("rung", "runs left", "steps", "FLOPs of a run", "hours left", "GB", "visible")
    by_trend = cost["visible_by_the_trend"]
    lines = [table(names, rows), ""]
    lines.append("visible: smallest difference on the rung alone that is found with 80% power")
    if cost["deviation"] is not None:
        lines.append(f"at a standard deviation of {cost['deviation']:.2g} of a pair, from {cost['deviation_from']}")
    if by_trend is not None:
        lines.append(f"by the trend over all rungs, after Holm: {by_trend:.4f} at the largest rung that is fitted")
    return "\n".join(lines)


def _validate(as_json: bool) -> None:
    from lapcli.experiments.simulation import validate

    checks = validate()
    rows = [(c.name, f"{c.found:.3f}", f"{c.low:g} to {c.high:g}", "yes" if c.is_met else "NO") for c in checks]
    print_json([vars(c) | {"is_met": c.is_met} for c in checks]) if as_json else print(
        table(("property over simulated ladders", "found", "expected", "met"), rows)
    )
    if missed := sum(not check.is_met for check in checks):
        raise LapError(f"{missed} of {len(checks)} properties of the referee do not hold")
