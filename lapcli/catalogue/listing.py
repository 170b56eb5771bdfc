"""Lists the runs of a folder, a line for each: kind, head plan, step, best score, age, size and status."""

import fnmatch
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lapcli.recipe import recipe_to_dict
from lapcli.recipe.schema import RUN, LayerRange
from lapcli.runs import INFO, METRICS, RECIPE, SUMMARY, SWEEP, Run, read_run, read_summary, runs_in, unknown_run
from lapcli.runtime.errors import UsageError
from lapcli.training.metrics import last_step_metrics, parse_line

SWEEPS = ".sweeps"  # in a folder of runs: locks and logs of the sweeps that trained some of them
_LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity", "bpb")
#: The number of a validation that represents a run, in this order of preference; for other kinds the first one.
_MAIN_SCORES = ("validation_top1", "validation_knn", "validation_bits_per_byte", "validation_loss")


@dataclass(frozen=True)
class Score:
    """The best of a run's validations."""

    metric: str
    value: float
    step: int

    def __str__(self) -> str:
        return f"{self.metric.removeprefix('validation_')} {self.value:.4f}"


@dataclass(frozen=True)
class ListedRun:
    """A run in one line. Little is known of a damaged run, and `problem` says what is wrong."""

    name: str
    path: Path
    status: str
    bytes: int
    kind: str | None = None
    plan: str | None = None
    step: int | None = None
    steps: int | None = None
    best: Score | None = None
    seconds_since: float | None = None  # its run.json was written
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def list_runs(runs_dir: Path, names: Sequence[str] = ()) -> list[ListedRun]:
    """List the runs of these names or patterns, all runs without any; the one written last comes first."""
    listed = [_listed(path) for path in matching_runs(runs_dir, names)]
    return sorted(listed, key=lambda run: (run.seconds_since is None, run.seconds_since or 0.0, run.name))


def matching_runs(runs_dir: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders of the runs with these names, folders or patterns; all runs without any."""
    if not names:
        return runs_in(runs_dir)
    chosen: dict[Path, None] = {}
    for name in names:
        direct = Path(name) if (Path(name) / INFO).is_file() else runs_dir / name
        paths = [direct] if (direct / INFO).is_file() else []
        paths = paths or [path for path in runs_in(runs_dir) if fnmatch.fnmatchcase(path.name, name)]
        if not paths and Path(name).is_dir() and runs_in(Path(name)):
            raise UsageError(f"{name} is a folder of runs, not a run; use --runs-dir {name}")
        if not paths:
            raise unknown_run(runs_dir, name)
        chosen.update(dict.fromkeys(paths))
    return list(chosen)


def _listed(path: Path) -> ListedRun:
    try:
        run = read_run(path)
        best = best_validation(run)
    except UsageError as error:
        return ListedRun(path.name, path, "damaged", size_of(path), problem=str(error))
    return ListedRun(
        name=run.name,
        path=path,
        status=run.status,
        bytes=size_of(path),
        kind=run.recipe.objective,
        plan=plan_of(run),
        step=last_step(run),
        steps=run.info.get("steps"),
        best=best,
        seconds_since=_seconds_since(run.info.get("updated") or run.info.get("created")),
    )


def plan_of(run: Run) -> str | None:
    """Return `laplacian_heads` or `operators` as the recipe writes it."""
    model = getattr(run.recipe, "model", None)
    if getattr(model, "operators", None) is not None:
        return str(model.head_plan().label())  # type: ignore[union-attr]
    plan = getattr(model, "laplacian_heads", None)
    plan = plan.model_dump() if isinstance(plan, LayerRange) else plan
    return plan if plan is None or isinstance(plan, str) else json.dumps(plan)


def last_step(run: Run) -> int:
    """Return the step of the last checkpoint, or of the last line of metrics of a run that is being trained."""
    step = int(run.info.get("step") or 0)
    return max(step, last_step_metrics(run.metrics).get("step", 0)) if run.status == "running" else step


def validations(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl` with a validation; the others, which are most, are not parsed."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        return [line for text in file if b'"validation_' in text and (line := parse_line(text))]


def best_validation(run: Run, among: Sequence[int] | None = None) -> Score | None:
    """Return the best value of the run's main metric, the first of equals; `among`: of these steps only."""
    lines = [line for line in validations(run.path / METRICS) if among is None or line["step"] in among]
    names = [name for line in lines for name in line if name.startswith("validation_")]
    metric = next((name for name in _MAIN_SCORES if name in names), names[0] if names else None)
    # Step 0 is the validation before training: not a result of it, even where it is the best.
    values = {line["step"]: float(line[metric]) for line in lines if metric in line and line["step"] > 0}
    if metric is None or not values:
        return None
    choose = min if lower_is_better(metric) else max
    # Sorted, since min and max return the first of equals.
    step = choose(sorted(values), key=lambda step: values[step])
    return Score(metric, values[step], step)


def lower_is_better(metric: str) -> bool:
    return any(word in metric for word in _LOWER_IS_BETTER)


def started_from(run: Run) -> tuple[str, str] | None:
    """Return the source of the weights that this run started from, and their sha256; a run without prefix and step."""
    init_from = run.recipe.train.init_from
    if init_from is None:
        return None
    is_run = init_from.source.startswith(RUN)
    source = init_from.source.removeprefix(RUN).partition("@")[0] if is_run else init_from.source
    return source, str(init_from.sha256)


def is_of_a_sweep(path: Path) -> bool:
    """Return whether a sweep trained the run, and would train it again if it were gone."""
    work = path.parent / SWEEPS
    return any(file.exists() for file in (path / SWEEP, work / f"{path.name}.log", work / f"{path.name}.lock"))


def size_of(folder: Path) -> int:
    """Return the bytes on the disk; links are not followed, and files that disappear meanwhile do not count."""
    total = 0
    for file in folder.rglob("*"):
        try:
            stat = file.lstat()
        except OSError:
            continue
        # POSIX counts blocks of 512 bytes, whatever the file system's own size.
        total += stat.st_blocks * 512
    return total


def sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each folder of a run (checkpoints, evaluations, analyses), and of the rest."""
    parts = {part.name: size_of(part) for part in sorted(path.iterdir()) if part.is_dir()}
    return {**parts, "other": size_of(path) - sum(parts.values())}


def describe(run: Run) -> dict[str, Any]:
    """Return everything that `lap runs show` prints: run.json, recipe, scores, checkpoints and sizes."""
    return {
        **_listed(run.path).to_dict(),
        "info": run.info,
        "started_from": started_from(run),
        "checkpoints": sorted(folder.name for folder in run.checkpoints.glob("step-*")),
        "evaluations": sorted(file.name for file in (run.path / "eval").glob("*.json")),
        "analyses": sorted(
            str(file.relative_to(run.path / "analysis")) for file in (run.path / "analysis").rglob("*.json")
        ),
        "summary": read_summary(run) if (run.path / SUMMARY).is_file() else None,
        "sizes": sizes(run.path),
        "recipe_file": str(run.path / RECIPE),
        "recipe": recipe_to_dict(run.recipe),
    }


def _seconds_since(moment: Any) -> float | None:
    try:
        return max(0.0, time.time() - datetime.fromisoformat(str(moment)).timestamp())
    except ValueError:
        return None
