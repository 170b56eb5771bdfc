"""The costs of a row beside its scores.

cost.added_parameters      of the head operators, beyond the plain model's
cost.added_flops           additions and multiplications of the operators for a token, forward
cost.flops_per_step        of the model's matrices
cost.images_per_second     measured, the median over steps
cost.peak_memory           measured, of rank 0's process or GPU, in bytes
"""

import math
import statistics
from typing import TYPE_CHECKING

from lapcli.heads.plan import head_plan, operator_plan
from lapcli.report.statistics import is_number

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
