"""`lap watch`: draw curves of runs in the terminal while they train."""

import json
import shutil
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Annotated

import typer

from lapcli.commands import options
from lapcli.commands.options import table
from lapcli.runtime.environment import runs_dir as default_runs_dir

if TYPE_CHECKING:
    from lapcli.catalogue.watching import WatchedRun

EXAMPLES = """\b
Examples:
  lap watch
  lap watch quickstart baseline --metric validation_bits_per_byte
  lap watch 'vit_digits-*' --once
"""

_UNBROKEN = "\N{NO-BREAK SPACE}"


def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUNS",
            autocompletion=options.run_names,
            help="Names, folders or patterns; by default those that are being trained, else the newest.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="Metric to draw, by its name in metrics.jsonl.")] = "loss",
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Draw once, and stop.")] = False,
    runs_dir: options.RunsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per change and line.")] = False,
) -> None:
    """Draw curves of runs while they train. Without a terminal: a line for each change and no curve."""

    from lapcli.catalogue.watching import check_metric, chosen_runs, read_watched_run

    paths = chosen_runs(runs_dir or default_runs_dir(), runs or [])
    check_metric(paths, metric)
    is_screen = sys.stdout.isatty() and not as_json
    told: dict[str, tuple[int, str]] = {}
    while True:
        seen = [read_watched_run(path, metric) for path in paths]
        if is_screen:
            # Clears the screen and moves the cursor to its corner; with --once the picture stays in the scroll-back.
            print(("" if once else "\x1b[2J\x1b[H") + _screen(seen, metric), flush=True)
        for run in [] if is_screen else seen:
            if told.get(run.name) != (run.step, run.status):
                told[run.name] = run.step, run.status
                row = {"run": run.name, "step": run.step, "steps": run.steps, "status": run.status, **run.values}
                print(json.dumps(row) if as_json else run.line(), flush=True)
        if once or all(run.status != "running" for run in seen):
            return
        try:
            time.sleep(every)
        except KeyboardInterrupt:  # ends only this command; the runs continue
            return


def _screen(seen: "list[WatchedRun]", metric: str) -> str:
    """Return a picture with one line of text for each run; for sweeps and many runs, a table."""

    from lapcli.catalogue.watching import LETTERS, plot_curves

    width, height = shutil.get_terminal_size()
    if len(seen) > len(LETTERS) or (len(seen) > 1 and all(run.is_of_a_sweep for run in seen)):
        rows = [
            (run.name, f"{run.step:,}/{run.steps or '?'}", f"{run.values.get(metric, float('nan')):.4g}", run.status)
            for run in seen
        ]
        return table(("run", "step", metric, "status"), rows, width)
    letters = LETTERS if len(seen) > 1 else ""
    lines = [f"{letters[n]}  {run.line()}" if letters else run.line() for n, run in enumerate(seen)]
    # A name stays with its value: parts are separated by two spaces, and single spaces inside them must not wrap.
    unbroken = (line.replace("  ", "\0").replace(" ", _UNBROKEN).replace("\0", "  ") for line in lines)
    wrapped = (part for line in unbroken for part in textwrap.wrap(line, width, subsequent_indent="   "))
    shown = [part.replace(_UNBROKEN, " ") for part in wrapped]
    return "\n".join([plot_curves(seen, metric, width, max(8, min(24, height - len(shown) - 2))), *shown])
