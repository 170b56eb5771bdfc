"""Trials of a search, read from the run directories. The state of a search is stored nowhere else.

    runs/NAME-t004/               trial 4 of the search, an ordinary run
    runs/NAME-c004/               trial 4 of the control
    runs/NAME-t004/search.json    its arm, number and parameters, and the trials known when it was proposed
    runs/NAME-winner004-seed1/    confirms trial 4 of the search on seed 1; NAME-control002-seed1 is its control

The search and the trial's process hold a lock on the trial, and the run's own lock prevents anyone else from training
it. Several processes and machines can therefore share a search, and whatever is killed is resumed.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.recipe import OBJECTIVES, recipe_hash
from lapcli.runs import INFO, METRICS, SWEEP, new_run, read_info, read_run, status_of, unlock, update_run_info
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.files import read_json
from lapcli.search.space import Params, Space, space_from_file, space_from_options
from lapcli.sweep.grid import Cell, Over
from lapcli.sweep.state import last_validation
from lapcli.training.metrics import read_metrics

RECORD = "search.json"
SEARCH, CONTROL = "search", "control"
LETTERS = {SEARCH: "t", CONTROL: "c"}
RUN_AGAIN = "remove the run, and its trial is proposed again"
KnownTrials = list[list[Any]]  # [number, state, number of reports] of each known trial


@dataclass(frozen=True)
class Trial:
    """One trial of an arm: `state` is finished, pruned, diverged, failed, interrupted or running."""

    name: str
    arm: str
    number: int
    params: Params
    state: str
    step: int = 0
    seconds: float = 0.0  # training and validation
    reports: tuple[tuple[int, float], ...] = ()  # (step, value) of each validation after step 0
    value: float | None = None  # metric of the last validation; only finished trials have one
    told: tuple[tuple[int, str, int], ...] = ()
    reason: str = ""

    @property
    def is_settled(self) -> bool:
        return self.state in ("finished", "pruned", "diverged")


@dataclass(frozen=True)
class SearchSpec:
    """The settings of a search."""

    name: str
    space: Space
    metric: str
    higher_is_better: bool
    seed: int
    trials: int
    sampler: str = "tpe"
    pruner: str = "halving"
    confirmations: int = 3
    max_steps: int | None = None  # for each arm, as is max_hours
    max_hours: float | None = None

    def arm(self, arm: str) -> Space:
        return self.space if arm == SEARCH else self.space.control()

    def trial_name(self, arm: str, number: int) -> str:
        return f"{self.name}-{LETTERS[arm]}{number:03d}"

    def identity(self) -> dict[str, Any]:
        """Return what proposals and comparisons depend on; a search resumes only trials with the same identity."""
        return {
            "recipe": recipe_hash(self.space.base),
            "space": self.space.describe(),
            "metric": self.metric,
            "seed": self.seed,
            "sampler": self.sampler,
            "pruner": self.pruner,
        }

    def cell(self, arm: str, number: int, params: Params) -> Cell:
        space = self.arm(arm)
        return Cell(
            self.trial_name(arm, number),
            space.recipe,
            space.overrides(params),
            params,
            space.load(params),
            is_search=True,
        )

    def better(self, one: float, other: float) -> bool:
        return one > other if self.higher_is_better else one < other


def spec_from(
    recipe: Path,
    space: Path | Over,
    options: Sequence[str],
    *,
    metric: str,
    **settings: Any,
) -> SearchSpec:
    """Return the checked search of a command line; raise UsageError or RecipeError with all problems."""
    if isinstance(space, Path):
        read = space_from_file(recipe, space, options)
    else:
        read = space_from_options(recipe, space, options)
    known = OBJECTIVES[read.base.objective].metrics
    if metric not in known and not metric.startswith("smoothing"):
        raise UsageError(f"{metric[:60]!r} is not a validation metric of this recipe; use one of {', '.join(known)}")
    higher = known.get(metric, (None, "lower"))[1] == "higher"
    return SearchSpec(space=read, metric=metric, higher_is_better=higher, **settings)


def read_trials(
    spec: SearchSpec, runs_dir: Path, settled: dict[str, tuple[int, Trial]] | None = None
) -> dict[str, list[Trial]]:
    """Return the trials of both arms in order; raise UsageError if they belong to another search with this name.

    `settled` remembers trials that have ended: they are read again only if their `run.json` has changed.
    """
    settled = {} if settled is None else settled
    trials: dict[str, list[Trial]] = {SEARCH: [], CONTROL: []}
    for arm, known in trials.items():
        number = 0
        # Numbers have no gaps, since a trial is created only after all before it; a removed run hides those after it.
        while (info := runs_dir / spec.trial_name(arm, number) / INFO).is_file():
            written, trial = settled.get(info.parent.name, (0, None))
            changed = info.stat().st_mtime_ns
            if trial is None or written != changed:
                trial = read_trial(spec, runs_dir, arm, number)
                if trial.is_settled:
                    settled[trial.name] = changed, trial
            known.append(trial)
            number += 1
    return trials


def read_trial(spec: SearchSpec, runs_dir: Path, arm: str, number: int) -> Trial:
    path = runs_dir / spec.trial_name(arm, number)
    record = read_json(path / RECORD, RUN_AGAIN) if (path / RECORD).is_file() else None
    if record is None:
        raise UsageError(f"{path} is a run, but not a trial of this search; choose another --name for the search")
    _refuse_another(spec, path, record)
    info = read_info(path)
    status = status_of(path, info)
    state = {"interrupted": "pruned" if info.get("pruned") else "interrupted"}.get(status, status)
    if status == "failed" and info.get("diverged"):
        state = "diverged"
    params = dict(record["params"])
    told = tuple((int(n), str(known), int(count)) for n, known, count in record["told"])
    lines = read_metrics(path / METRICS)
    value = None
    if state == "finished":
        numbers = last_validation(Cell(path.name, spec.space.recipe, (), {}, spec.space.base), runs_dir)
        if spec.metric not in numbers:
            raise LapError(
                f"the last validation of {path.name} has no {spec.metric}; "
                + (f"use --metric {' or '.join(numbers)}" if numbers else "the run was not validated")
            )
        value = numbers[spec.metric]
        if not math.isfinite(value):
            # The last validation may be NaN, which would compare as neither better nor worse than any other.
            state, value = "diverged", None
    return Trial(
        path.name,
        arm,
        number,
        params,
        state,
        # `run.json` has the step of the last save, `metrics.jsonl` may be ahead of it.
        step=max([int(info.get("step") or 0), *(int(line["step"]) for line in lines)]),
        seconds=sum(_seconds(line) for line in lines),
        reports=tuple((int(line["step"]), float(line[spec.metric])) for line in lines if _is_report(line, spec.metric)),
        value=value,
        told=told,
        reason=str(info.get("failure") or ""),
    )


def _refuse_another(spec: SearchSpec, path: Path, record: dict[str, Any]) -> None:
    # Through JSON, as the record was: tuples have become lists.
    now, then = json.loads(json.dumps(spec.identity())), record["search"]
    # `--trials`, `--confirm` and the budgets are not part of the identity: a search may be resumed with more of them.
    differing = [key for key in now if now[key] != then.get(key)]
    if differing:
        raise UsageError(
            f"{path} is a trial of a search with another {' and '.join(differing)}; repeat the options of that search, "
            "or choose another --name"
        )


def _is_report(line: dict[str, Any], metric: str) -> bool:
    value = line.get(metric)
    return line["step"] > 0 and isinstance(value, int | float) and math.isfinite(value)


def _seconds(line: dict[str, Any]) -> float:
    return sum(float(value) for name, value in line.items() if name.startswith("seconds"))


def known_trials(trials: Sequence[Trial]) -> KnownTrials:
    """Return the summary of the known trials that the record of a proposal stores."""
    return [[trial.number, trial.state, len(trial.reports)] for trial in trials]


def create(spec: SearchSpec, runs_dir: Path, cell: Cell, arm: str, number: int, told: KnownTrials) -> None:
    """Create the trial's run with its record, ready to be trained."""
    from lapcli.objectives.weights import with_sha256

    # With the sha256 of initial weights, as `lap train` adds it: otherwise it would refuse the run for its recipe.
    recipe = with_sha256(cell.loaded, runs_dir / cell.name)
    record = {"search": spec.identity(), "arm": arm, "trial": number, "params": dict(cell.values), "told": told}
    # Interrupted until the trial's process sets it to running.
    unlock(new_run(runs_dir, cell.name, recipe, {RECORD: record, SWEEP: {"search": True}}, status="interrupted"))


def mark_pruned(runs_dir: Path, name: str) -> None:
    """Mark an interrupted run as pruned. Its checkpoint stays, and `lap train` can resume it."""
    update_run_info(runs_dir / name, pruned=True)


def finished_value(spec: SearchSpec, runs_dir: Path, cell: Cell) -> float | None:
    """Return the metric of a confirmation run that finished with the cell's recipe, or None."""
    path = runs_dir / cell.name
    if not (path / INFO).is_file() or read_run(path).status != "finished":
        return None
    value = last_validation(cell, runs_dir).get(spec.metric)
    return value if value is not None and math.isfinite(value) else None
