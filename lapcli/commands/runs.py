"""`lap runs`: list, compare, watch, track, rename, prune and remove runs."""

import contextlib
import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from lapcli.commands import options
from lapcli.commands.options import print_json, table
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import facts, wrapped_message

EXAMPLES = """\b
Examples:
  lap runs diff quickstart baseline
  lap runs watch quickstart baseline --metric validation_bits_per_byte
  lap runs track quickstart --to tensorboard
  lap runs show quickstart --json
  lap runs prune 'vit_*' --keep 2
"""


class SharedOptions(TyperGroup):
    """The options of the group may also stand after the name of a command."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        shared: list[str] = []
        own: list[str] = []
        words = deque(args)
        while words:
            word = words.popleft()
            if word == "--runs-dir" and words:
                shared += [word, words.popleft()]
            else:
                (shared if word == "--json" or word.startswith("--runs-dir=") else own).append(word)
        return super().parse_args(ctx, [*shared, *own])


app = typer.Typer(
    cls=SharedOptions,
    help="List, compare, watch, rename and remove runs. Without a command, all runs are listed.",
    invoke_without_command=True,
    epilog=EXAMPLES,
    rich_markup_mode=None,
)

_LONGEST = 48  # characters of a value beside another
_UPDATE = 2.0  # seconds between two pictures of `watch`
RunName = Annotated[
    str, typer.Argument(metavar="RUN", autocompletion=options.run_names, help="Name or folder of a run.")
]
SomeRuns = Annotated[
    list[str],
    typer.Argument(metavar="RUNS", autocompletion=options.run_names, help="Names, folders or patterns of runs."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@dataclass(frozen=True)
class Shared:
    """The options of the group."""

    folder: Path
    as_json: bool


@app.callback()
def runs(context: typer.Context, runs_dir: options.RunsDir = None, as_json: options.Json = False) -> None:
    folder, command = runs_dir or default_runs_dir(), context.invoked_subcommand
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of runs; see --runs-dir")
    if as_json and command not in (None, "list", "show", "diff", "watch"):
        raise UsageError(f"--json has no effect for lap runs {command}; leave it out")
    context.obj = Shared(folder, as_json)
    if command is None:
        list_(context)


@app.command("list")
def list_(context: typer.Context, names: options.Runs = None) -> None:
    """List runs, the newest first: objective, Laplacian heads, step, best validation, age, size and status."""
    from lapcli.catalogue import list_runs

    folder = context.obj.folder
    listed = list_runs(folder, names or [])
    if context.obj.as_json:
        print_json(listed)
    elif not listed:
        print(f"no runs in {folder}; lap train quickstart trains one", file=sys.stderr)
    else:
        rows = []
        for run in listed:
            step = f"{run['step']:,}" + (f"/{run['steps']:,}" if run["steps"] else "") if "step" in run else ""
            known = (run["name"], run.get("objective", "?"), run.get("plan") or "", step, _best_text(run.get("best")))
            rows.append((*known, age_text(run.get("seconds_since")), size_text(run["bytes"]), run["status"]))
        print(table(("run", "objective", "Laplacian", "step", "best", "age", "size", "status"), rows))
        for run in listed:
            if "problem" in run:
                print(wrapped_message(f"note: {run['problem']}"), file=sys.stderr)


@app.command()
def show(context: typer.Context, name: RunName) -> None:
    """Show one run: recipe, data, results, checkpoints, sizes."""
    from lapcli.catalogue import describe
    from lapcli.runs import named_run

    described = describe(named_run(context.obj.folder, name))
    if context.obj.as_json:
        print_json(described)
        return
    info, start = described["info"], described["started_from"]
    steps = f"{described['step']:,} of {described['steps'] or '?'}"
    rows = {
        "run": f"{described['path']}, {described['objective']}, {described['status']}",
        "heads": f"{described['plan'] or 'no'}{'' if described['names_operators'] else ' Laplacian'}",
        "step": f"{steps}, seed {info.get('seed')}, {info.get('device', '')}",
        "written": f"{age_text(described['seconds_since'])} ago; created {info.get('created')}",
        "failure": info.get("failure"),
        "started from": start and f"{start[0]}, weights sha256 {start[1][:16]}",
        "data": info.get("data", "not prepared yet"),
        "best": _best_text(described["best"]) + (f" at step {described['best']['step']}" if described["best"] else ""),
        "results": ", ".join(f"{key} {_value(value)}" for key, value in described["results"].items()),
        "checkpoints": ", ".join(described["checkpoints"]) or "none",
        "size": size_text(described["bytes"]),
        "weights": f"sha256 {info.get('weights_sha256') or 'none yet'}",
        "recipe": f"sha256 {info.get('recipe_sha256')}",
        "versions": ", ".join(f"{key} {value}" for key, value in info.get("versions", {}).items()),
    }
    print(facts([(key, str(text)) for key, text in rows.items() if text]))


@app.command()
def diff(context: typer.Context, a: RunName, b: RunName) -> None:
    """Compare two runs: recipe keys, data and versions that differ, and the results of both."""
    from lapcli.catalogue import difference
    from lapcli.runs import named_run

    first, second = (named_run(context.obj.folder, name) for name in (a, b))
    sections = difference(first, second)
    if context.obj.as_json:
        keyed = {what: [dict(zip(["key", "a", "b"], row, strict=True)) for row in sections[what]] for what in sections}
        print_json({"a": str(first.path), "b": str(second.path), **keyed})
        return
    print(f"A = {first.path}\nB = {second.path}")
    for what, rows in sections.items():
        shown = [(key, _value(old), _value(new)) for key, old, new in rows]
        print(f"\n{what}\n{table(('key', 'A', 'B'), shown)}" if rows else f"\n{what}: the same")


@app.command()
def watch(
    context: typer.Context,
    names: options.Runs = None,
    metric: Annotated[str, typer.Option("--metric", help="Metric to draw, by its name in metrics.jsonl.")] = "loss",
) -> None:
    """Draw curves of runs while they train; by default of those in training, else of the newest.

    Without a terminal: a line for each change and no curve.
    """
    from lapcli.catalogue import chosen_runs, read_watched_run, screen

    paths = chosen_runs(context.obj.folder, names or [], metric)
    is_screen = sys.stdout.isatty() and not context.obj.as_json
    shown: dict[str, tuple[int, str]] = {}
    while True:
        seen = [read_watched_run(path, metric) for path in paths]
        is_over = all(run.status != "running" for run in seen)
        if is_screen:
            # Clears the screen and moves the cursor to the corner; the last plot stays in the scroll-back.
            print(("" if is_over else "\x1b[2J\x1b[H") + screen(seen, metric), flush=True)
        for run in [] if is_screen else seen:
            if shown.get(run.name) != (run.step, run.status):
                shown[run.name] = run.step, run.status
                row = {"run": run.name, "step": run.step, "steps": run.steps, "status": run.status, **run.values}
                print(json.dumps(row) if context.obj.as_json else run.line(), flush=True)
        if is_over:
            return
        try:
            time.sleep(_UPDATE)
        except KeyboardInterrupt:  # ends only this command; the runs continue
            return


@app.command()
def track(
    context: typer.Context,
    names: SomeRuns,
    to: Annotated[Literal["tensorboard", "wandb", "trackio"], typer.Option("--to", help="The tracker.")],
) -> None:
    """Send metrics, evaluations and recipes of runs of any status to TensorBoard, W&B or trackio."""
    from lapcli.catalogue import matching_runs
    from lapcli.runs import read_run
    from lapcli.tracking import replay

    paths = matching_runs(context.obj.folder, names)
    sent = {path.name: replay(read_run(path), to) for path in paths}
    print("\n".join(f"{name}: {steps:,} steps sent to {to}" for name, steps in sent.items()))


@app.command()
def rename(
    context: typer.Context, name: RunName, new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")]
) -> None:
    """Rename a run. A run that is being trained, or that another run started from, is refused."""
    from lapcli.catalogue import rename_run
    from lapcli.runs import named_run

    print(rename_run(named_run(context.obj.folder, name), new))


@app.command()
def rm(context: typer.Context, names: SomeRuns, yes: Yes = False) -> None:
    """Remove runs with everything in them, after asking. A run that is being trained is refused."""
    from lapcli.catalogue import dependent_runs, matching_runs, refuse_running, remove_run, size_of

    paths = matching_runs(context.obj.folder, names)
    refuse_running(paths)
    remarks: list[str] = []
    for path in paths:
        with contextlib.suppress(UsageError):  # a damaged run elsewhere in the folder must not prevent the removal
            if others := [name for name in dependent_runs(path) if path.parent / name not in paths]:
                remarks.append(f"{', '.join(others)} started from {path.name}.")
    listed, size = ", ".join(map(str, paths)), size_text(sum(map(size_of, paths)))
    _confirm(" ".join([f"Remove {listed} ({size})?", *remarks]), yes)
    for path in paths:
        print(f"removed {path}, {size_text(remove_run(path))}")


@app.command()
def prune(
    context: typer.Context,
    names: options.Runs = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest checkpoints of each run to keep.")] = 1,
    yes: Yes = False,
) -> None:
    """Remove old checkpoints, after asking: never the newest or the best."""
    from lapcli.catalogue import matching_runs, prunable, remove_checkpoints, size_of
    from lapcli.runs import read_run

    doomed: dict[Path, list[Path]] = {}
    for path in matching_runs(context.obj.folder, names or []):
        try:
            doomed[path] = prunable(read_run(path), keep)
        except UsageError:  # it is being trained, or damaged
            if names:
                raise
    rows = [
        (path.name, f"remove {', '.join(each.name for each in folders)}") for path, folders in doomed.items() if folders
    ]
    print(facts(rows) if rows else "nothing to remove")
    if rows:
        freed = size_text(sum(size_of(folder) for folders in doomed.values() for folder in folders))
        _confirm(f"Remove {sum(map(len, doomed.values()))} checkpoints ({freed})?", yes)
        for path, folders in doomed.items():
            remove_checkpoints(path, folders)
        print(f"freed {freed}")


def _value(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _best_text(best: dict[str, Any] | None) -> str:
    return "" if best is None else f"{best['metric'].removeprefix('validation_')} {best['value']:.4f}"


def size_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def age_text(seconds: float | None) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds is not None and (seconds >= length or unit == "s"):
            return f"{seconds / length:.0f} {unit}"
    return "?"


def _confirm(question: str, yes: bool) -> None:
    """Exit with 1 unless the user agrees, by --yes or in the terminal; raise UsageError without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to answer on; use --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Exit(1)
