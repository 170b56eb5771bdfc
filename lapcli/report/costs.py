"""The costs of a row beside its scores, and scores at equal measured time instead of equal steps.

    cost.added_parameters      of the head operators, beyond the plain model's
    cost.added_flops           additions and multiplications of the operators for a token, forward
    cost.flops_per_step        of the model's matrices
    cost.images_per_second     measured, the median over steps
    cost.peak_memory           measured, of rank 0's process or GPU, in bytes

At equal time each run's score is interpolated linearly between its validations before and after the time that the
shortest run of the table took for its training steps. Times of different devices say nothing about models, so that all
runs of a table must have been trained on the same one.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lapcli.heads.plan import head_plan, operator_plan
from lapcli.report.statistics import is_number
from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:
    from lapcli.report.collect import RunResult
    from lapcli.report.grouping import RunGrid

COSTS = "costs"  # the column that means all of them
PREFIX = "cost."


def costs_of(run: "RunResult") -> dict[str, float]:
    """Return the known costs of a run; version 0.1 recorded neither FLOPs nor memory."""
    costs: dict[str, float] = {}
    model = run.recipe.get("model") or {}
    if {"layers", "heads", "width"} <= set(model):
        operators = model.get("operators")
        plan = (operator_plan if operators is not None else head_plan)(
            operators if operators is not None else model.get("laplacian_heads", 0), model["layers"], model["heads"]
        )
        size = model["width"] // model["heads"]
        learnt = (
            entry
            for layer in plan.layers
            for claim in layer
            for entry in claim.operator.parameters(claim.heads, size, model["width"]).values()
        )
        costs["added_parameters"] = sum(math.prod(entry.shape) for entry in learnt)
        costs["added_flops"] = plan.added_flops(size, model["width"])
    for name in ("flops_per_step", "peak_memory"):
        if is_number(run.info.get(name)):
            costs[name] = float(run.info[name])
    rates: dict[str, list[float]] = {}
    for line in run.curve:
        for name, value in line.items():
            if name.endswith("_per_second") and is_number(value):
                rates.setdefault(name, []).append(float(value))
    costs |= {name: statistics.median(values) for name, values in rates.items()}
    return {f"{PREFIX}{name}": value for name, value in costs.items()}


def has_operators(grid: "RunGrid") -> bool:
    """Return whether head operators are compared, so that their costs belong beside their scores."""
    return any((run.recipe.get("model") or {}).get("operators") for run in grid.runs)


def cost_columns(grid: "RunGrid") -> list[str]:
    return [name for name in grid.metrics() if name.startswith(PREFIX)]


def at_equal_time(grid: "RunGrid") -> str | None:
    """Replace each finished run's last scores by those at the time of the shortest run; return a note with the time.

    UsageError if the runs were trained on different devices. None if no run of the grid has measured times.
    """
    runs = [run for run in grid.runs if run.is_finished]
    # By id: a RunResult can be changed and therefore has no hash.
    timed = {id(run): _validations_by_time(run) for run in runs}
    runs = [run for run in runs if timed[id(run)]]
    if not runs:
        return None
    devices = {device_of(run.info): run.name for run in runs}
    if len(devices) > 1:
        listed = "; ".join(f"{name} on {device}" for device, name in sorted(devices.items())[:4])
        raise UsageError(
            f"--at time compares runs of one device, and those of {grid.title} were trained on {len(devices)}: "
            f"{listed}; name runs of one device, or use --at steps"
        )
    shortest = min(max(timed[id(run)]) for run in runs)
    for run in grid.runs:
        points = timed.get(id(run)) or {}
        for name in [name for name in run.numbers if not name.startswith(PREFIX)]:
            value = _at(points, shortest, name)
            if value is None:  # measured only on the last weights, so that its value at that time is not known
                del run.numbers[name]
            else:
                run.numbers[name] = replace(run.numbers[name], value=value)
    where = next(iter(devices))
    return f"{grid.title}: scores at {shortest:.1f} s of training steps, the time of the shortest run, on {where}"


def device_of(info: Mapping[str, Any]) -> str:
    """Name the device. A GPU is identified by its name, a CPU only together with machine and number of threads."""
    device = str(info.get("device"))
    if not device.endswith(" x cpu"):
        return device
    return f"{device} of {info.get('host')}, {info.get('threads')} thread{'s' if info.get('threads') != 1 else ''}"


def _validations_by_time(run: "RunResult") -> dict[float, dict[str, Any]]:
    """Return the validations by the seconds of training steps before them; empty without measured times."""
    seconds, validations = 0.0, {}
    for line in run.curve:
        # Without `seconds_validating` and `seconds_saving`, which depend on how often a recipe validates and saves.
        times = [line.get(name) for name in ("seconds", "seconds_first_step")]
        seconds += sum(float(value) for value in times if is_number(value))
        if "loss" not in line:  # a validation; every training step has a loss
            validations[seconds] = line
    return validations if seconds > 0 else {}


def _at(points: Mapping[float, Mapping[str, Any]], seconds: float, name: str) -> float | None:
    key = name if name.startswith("validation_") else f"validation_{name}"
    known = sorted((time, float(line[key])) for time, line in points.items() if is_number(line.get(key)))
    before = [point for point in known if point[0] <= seconds]
    after = [point for point in known if point[0] >= seconds]
    if not before or not after:
        return None
    (t0, v0), (t1, v1) = before[-1], after[0]
    return v0 if t1 == t0 else v0 + (v1 - v0) * (seconds - t0) / (t1 - t0)
