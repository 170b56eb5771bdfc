"""`lap runs`: list, compare, rename, prune and remove runs."""

import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.commands import options
from lapcli.commands.options import print_json, table
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import facts, wrapped_message

if TYPE_CHECKING:
    from lapcli.catalogue.housekeeping import Pruning

EXAMPLES = """\b
Examples:
  lap runs list 'vit_*'
  lap runs show quickstart
  lap runs diff quickstart baseline
  lap runs best --metric top1
"""


app = typer.Typer(
    help="List, compare, rename and remove runs. Without a command: the list of all.",
    invoke_without_command=True,
    epilog=EXAMPLES,
    rich_markup_mode=None,
)

_LONGEST = 48  # characters of a value beside another
RunName = Annotated[
    str, typer.Argument(metavar="RUN", autocompletion=options.run_names, help="Name or folder of a run.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def _folder(runs_dir: Any) -> Any:
    folder = runs_dir or default_runs_dir()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of runs; see --runs-dir")
    return folder


@app.callback()
def runs(context: typer.Context, runs_dir: options.RunsDir = None, as_json: options.Json = False) -> None:
    if context.invoked_subcommand is None:
        list_(None, runs_dir, as_json)


@app.command("list", epilog="\b\nExamples:\n  lap runs list\n  lap runs list 'vit_*' --json")
def list_(names: options.Runs = None, runs_dir: options.RunsDir = None, as_json: options.Json = False) -> None:
    """List runs, the newest first: kind, Laplacian heads, step, best validation, age, size and status."""

    from lapcli.catalogue.listing import list_runs

    folder = _folder(runs_dir)
    listed = list_runs(folder, names or [])
    if as_json:
        print_json([run.to_dict() for run in listed])
        return
    if not listed:
        print(f"no runs in {folder}; lap train quickstart trains one", file=sys.stderr)
        return
    rows = []
    for run in listed:
        step = "" if run.step is None else f"{run.step:,}/{run.steps:,}" if run.steps else f"{run.step:,}"
        best, age = "" if run.best is None else str(run.best), age_text(run.seconds_since)
        rows.append((run.name, run.kind or "?", run.plan or "", step, best, age, size_text(run.bytes), run.status))
    print(table(("run", "kind", "Laplacian", "step", "best", "age", "size", "status"), rows))
    for run in listed:
        if run.problem:
            print(wrapped_message(f"note: {run.problem}"), file=sys.stderr)


@app.command(epilog="\b\nExamples:\n  lap runs show quickstart\n  lap runs show quickstart --json")
def show(name: RunName, runs_dir: options.RunsDir = None, as_json: options.Json = False) -> None:
    """Show one run: recipe, data, scores, checkpoints, evaluations, sizes."""
    from lapcli.catalogue.listing import describe
    from lapcli.recipe.schema import TransformerModel
    from lapcli.runs import named_run

    run = named_run(_folder(runs_dir), name)
    told = describe(run)
    if as_json:
        print_json(told)
        return
    info, summary = told["info"], told["summary"] or {}
    model = getattr(run.recipe, "model", None)
    names_operators = isinstance(model, TransformerModel) and not model.head_plan().is_laplacian
    heads = told["plan"] if names_operators else f"{told['plan'] or 'no'} Laplacian"
    rows = [
        ("run", f"{told['path']}, {told['kind']}, {told['status']}"),
        ("heads", heads),
        ("step", f"{told['step']:,} of {told['steps'] or '?'}, seed {info.get('seed')}, {info.get('device', '')}"),
        ("written", f"{age_text(told['seconds_since'])} ago; created {info.get('created')}"),
    ]
    if info.get("failure"):
        rows.append(("failure", str(info["failure"])))
    if told["started_from"]:
        rows.append(("started from", f"{told['started_from'][0]}, weights sha256 {told['started_from'][1][:16]}"))
    rows.append(("data", str(info.get("data", "not prepared yet"))))
    for when in ("start", "end", "best"):
        numbers = [f"{key.removeprefix('validation_')} {value:.4f}" for key, value in summary.get(when, {}).items()]
        at = f" (step {summary['best_step']})" if when == "best" and numbers else ""
        rows += [(f"at the {when}" if when != "best" else "best", ", ".join(numbers) + at)] if numbers else []
    if not summary and run.status != "finished" and told["best"]:
        rows.append(("best", f"{told['best']['metric']} {told['best']['value']:.4f} at step {told['best']['step']}"))
    for key in ("checkpoints", "evaluations", "analyses"):
        rows.append((key, ", ".join(told[key]) or "none"))
    parts = ", ".join(f"{part} {size_text(count)}" for part, count in told["sizes"].items() if count)
    rows.append(("size", f"{size_text(told['bytes'])}: {parts}"))
    rows.append(("weights", f"sha256 {info.get('weights_sha256') or 'none yet'}"))
    rows.append(("recipe", f"{told['recipe_file']}, sha256 {str(info.get('recipe_sha256'))[:16]}"))
    rows.append(("versions", ", ".join(f"{key} {value}" for key, value in info.get("versions", {}).items())))
    print(facts(rows))


@app.command(epilog="\b\nExamples:\n  lap runs diff quickstart baseline\n  lap runs diff runs/a other/b --json")
def diff(
    a: RunName,
    b: RunName,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Compare two runs: recipe keys, data and versions that differ, and the scores of both."""
    from lapcli.catalogue.comparing import difference
    from lapcli.runs import named_run

    first, second = (named_run(_folder(runs_dir), name) for name in (a, b))
    sections = difference(first, second).sections()
    if as_json:
        as_rows = {
            what: [{"key": key, "a": old, "b": new} for key, old, new in rows] for what, rows in sections.items()
        }
        print_json({"a": str(first.path), "b": str(second.path), **as_rows})
        return
    print(f"A = {first.path}\nB = {second.path}")
    for what, rows in sections.items():
        print(f"\n{what}: the same" if not rows else f"\n{what}")
        if rows:
            print(table(("key", "A", "B"), [(key, _value(old), _value(new)) for key, old, new in rows]))


def _value(value: Any) -> str:

    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else "-" if value is None else json.dumps(value)
    if re.fullmatch("[0-9a-f]{64}", text):  # a sha256; its beginning is enough
        return text[:16]
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


@app.command(
    epilog="\b\nExamples:\n  lap runs best --metric top1\n  lap runs best 'quickstart*' --metric bits_per_byte"
)
def best(
    names: options.Runs = None,
    metric: Annotated[
        str, typer.Option("--metric", help="Score of the last weights, such as top1, arc_easy or bits_per_byte.")
    ] = "validation_loss",
    lowest: Annotated[
        bool | None,
        typer.Option("--lowest/--highest", help="Which is better.", show_default="by name: lowest for a loss"),
    ] = None,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Rank finished runs by a score, the best first."""

    from lapcli.catalogue.comparing import rank

    ranking = rank(_folder(runs_dir), names or [], metric, lowest)
    if as_json:
        placed = [vars(run) for run in ranking.runs]
        order = "lowest first" if ranking.lower_is_better else "highest first"
        print_json({"metric": ranking.metric, "order": order, "runs": placed, "without": ranking.without})
        return
    print(table(("run", "kind", ranking.metric), [(run.run, run.kind, f"{run.value:.6g}") for run in ranking.runs]))
    if ranking.without:
        print(wrapped_message(f"note: without {ranking.metric}: {', '.join(ranking.without)}"), file=sys.stderr)


@app.command(epilog="\b\nExamples:\n  lap runs rename quickstart first_try\n  lap runs rename sweep-cell kept --yes")
def rename(
    name: RunName,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Rename it even if it belongs to a sweep.")] = False,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Rename a run. A run that is being trained, or that another run started from, is refused."""
    from lapcli.catalogue.housekeeping import rename_run
    from lapcli.catalogue.listing import is_of_a_sweep
    from lapcli.runs import named_run

    run = named_run(_folder(runs_dir), name)
    if is_of_a_sweep(run.path) and not yes:
        raise UsageError(
            f"{run.path} belongs to a sweep, which would train it again under its old name; use --yes to rename it"
        )
    path = rename_run(run, new)
    print_json({"run": str(run.path), "renamed_to": str(path)}) if as_json else print(path)


@app.command(epilog="\b\nExamples:\n  lap runs rm first_try\n  lap runs rm 'try-*' --yes")
def rm(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUNS", autocompletion=options.run_names, help="Names, folders or patterns of runs."),
    ],
    yes: Yes = False,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove runs with everything in them, after asking. A run that is being trained is refused."""
    from lapcli.catalogue.housekeeping import dependent_runs, refuse_running, remove_run
    from lapcli.catalogue.listing import is_of_a_sweep, matching_runs, size_of

    paths = matching_runs(_folder(runs_dir), names)
    refuse_running(paths)
    remarks = []
    for path in paths:
        with contextlib.suppress(UsageError):  # a damaged run elsewhere in the folder must not prevent the removal
            if others := [name for name in dependent_runs(path) if path.parent / name not in paths]:
                remarks.append(f"{', '.join(others)} started from {path.name}.")
        if is_of_a_sweep(path):
            remarks.append(f"{path.name} belongs to a sweep, which would train it again.")
    size = size_text(sum(map(size_of, paths)))
    listed = ", ".join(str(path) for path in paths)
    if not ask_to_confirm(" ".join([f"Remove {listed} ({size})?", *remarks]), yes):
        raise typer.Exit(1)
    freed = {str(path): remove_run(path) for path in paths}
    if as_json:
        print_json({"removed": freed})
        return
    for removed, count in freed.items():
        print(f"removed {removed}, {size_text(count)}")


@app.command(epilog="\b\nExamples:\n  lap runs du\n  lap runs du 'vit_*' --json")
def du(names: options.Runs = None, runs_dir: options.RunsDir = None, as_json: options.Json = False) -> None:
    """Show the disk usage of each run, the largest first."""
    from lapcli.catalogue.listing import matching_runs, sizes

    measured = {path: sizes(path) for path in matching_runs(_folder(runs_dir), names or [])}
    order = sorted(measured, key=lambda path: -sum(measured[path].values()))
    if as_json:
        print_json([{"run": path.name, "bytes": sum(measured[path].values()), **measured[path]} for path in order])
        return
    rows = []
    for path in order:
        parts = measured[path]
        kept = parts.get("checkpoints", 0)
        total = sum(parts.values())
        rows.append((path.name, size_text(total), size_text(kept), size_text(total - kept)))
    whole = sum(sum(parts.values()) for parts in measured.values())
    rows.append(("total", size_text(whole), "", ""))
    print(table(("run", "size", "checkpoints", "other"), rows))


@app.command(epilog="\b\nExamples:\n  lap runs prune --dry-run\n  lap runs prune 'vit_*' --keep 2 --yes")
def prune(
    names: options.Runs = None,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest checkpoints of each run to keep.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; prune runs of a sweep too.")] = False,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove old checkpoints, after asking: never the newest, the best, or one that another run started from."""

    from lapcli.catalogue.housekeeping import plan_prunings
    from lapcli.catalogue.housekeeping import prune as remove_checkpoints
    from lapcli.catalogue.listing import matching_runs

    paths = matching_runs(_folder(runs_dir), names or [])
    prunings, left_out = plan_prunings(paths, keep, with_sweeps=yes, are_named=bool(names))
    for note in left_out:
        print(wrapped_message(f"note: {note}"), file=sys.stderr)
    doomed = [pruning for pruning in prunings if pruning.removed]
    freed = size_text(sum(pruning.bytes for pruning in doomed))
    if not as_json:
        for pruning in doomed:
            _print_pruning(pruning)
        if not doomed:
            print("nothing to remove")
    if doomed and not dry_run:
        count = sum(len(pruning.removed) for pruning in doomed)
        if not ask_to_confirm(f"Remove {count} checkpoint{'s' if count > 1 else ''} ({freed})?", yes):
            raise typer.Exit(1)
        for pruning in doomed:
            remove_checkpoints(pruning)
    if as_json:
        told = [{**vars(pruning), "path": str(pruning.path)} for pruning in prunings]
        print_json({"is_done": not dry_run, "runs": told, "left_out": left_out})
    elif doomed:
        print(f"{'would free' if dry_run else 'freed'} {freed}")


def _print_pruning(pruning: "Pruning") -> None:
    kept = ", ".join(f"{step} ({reason})" for step, reason in pruning.kept.items())
    steps = ", ".join(map(str, pruning.removed))
    print(facts([(pruning.run, f"remove steps {steps} ({size_text(pruning.bytes)}); keep {kept}")]))


def size_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def age_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ask_to_confirm(question: str, yes: bool) -> bool:
    """Return whether the user agrees, by --yes or by an answer in the terminal; raise UsageError without a terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to answer on; use --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
