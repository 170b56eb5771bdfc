"""Estimates the cost of a sweep's cells before anything starts: `lap sweep --dry-run`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lapcli.planning import TrainingPlan, plan_training
from lapcli.recipe import recipe_to_dict
from lapcli.runtime.devices import Device
from lapcli.runtime.tables import fitted
from lapcli.sweep.grid import Cell
from lapcli.sweep.state import commands_left, progress
from lapcli.sweep.sweep import Sweep, known_cells


@dataclass(frozen=True)
class CellCost:
    cell: str
    state: str
    steps: int | None  # None: a number of epochs over data that was not read
    flops: float | None
    flops_left: float | None
    hours: float | None  # that are left, if the device's peak is known


@dataclass(frozen=True)
class SweepCost:
    cells: list[CellCost]
    devices: str  # that the hours are estimated for

    @property
    def flops(self) -> float:
        return sum(cost.flops or 0 for cost in self.cells)

    @property
    def flops_left(self) -> float:
        return sum(cost.flops_left or 0 for cost in self.cells)

    @property
    def hours(self) -> float | None:
        """The hours that are left, cells one after the other; None if those of one are not known."""
        known = [cost.hours for cost in self.cells if cost.hours is not None]
        return sum(known) if len(known) == len(self.cells) else None

    def to_text(self) -> str:
        timed = any(cost.hours is not None for cost in self.cells)
        rows = [("cell", "state", "steps", "FLOPs", "left", *(("hours",) if timed else ()))]
        for cost in self.cells:
            steps = "by epochs" if cost.steps is None else f"{cost.steps:,}"
            hours = (_hours(cost.hours),) if timed else ()
            rows.append((cost.cell, cost.state, steps, _number(cost.flops), _number(cost.flops_left), *hours))
        total = (_hours(self.hours),) if timed else ()
        unknown = sum(cost.flops is None for cost in self.cells)
        flops, flops_left = (None if unknown else value for value in (self.flops, self.flops_left))
        rows.append(("in all", "", "", _number(flops), _number(flops_left), *total))
        left = sum(cost.state != "finished" for cost in self.cells)
        text = f"{len(self.cells)} cells, {left} to do" + (f"; {unknown} of unknown cost" if unknown else "")
        return "\n".join(
            [*fitted(rows), "", text, *((f"hours that are left, on {self.devices}, estimated",) if timed else ())]
        )

    def to_json(self) -> str:
        cells = [asdict(cost) for cost in self.cells]
        total = {"flops": self.flops, "flops_left": self.flops_left, "hours": self.hours, "devices": self.devices}
        return json.dumps({"cells": cells, **total}, indent=2)


def sweep_cost(
    sweep: Sweep, runs_dir: Path, only: str | None = None, device: Device | None = None, devices: int = 1
) -> SweepCost:
    """Estimate the cost of every cell on that many devices; without `device`, on this machine's.

    The cost of a grid that waits for its search is that of the recipe's own values.
    """
    plans: dict[str, TrainingPlan] = {}
    costs = []
    for cell, waits in known_cells(sweep, runs_dir, only):
        shape = _shape(cell)
        if shape not in plans:
            plans[shape] = plan_training(cell.loaded, devices, device)
        costs.append(_cost(cell, waits, runs_dir, plans[shape]))
    plan = next(iter(plans.values()))
    share = "" if plan.mfu is None else f" at {plan.mfu:.0%} of the peak"
    return SweepCost(costs, f"{devices} x {plan.device}{share}")


def _cost(cell: Cell, waits: bool, runs_dir: Path, plan: TrainingPlan) -> CellCost:
    steps, flops = plan.steps, plan.flops
    training = progress(cell, runs_dir)
    state = "after the search" if waits else training.status
    if training.is_trained and commands_left(cell, runs_dir):
        state = "trained"
    share = 0.0 if training.is_trained else 1 - training.step / steps if steps else 1.0
    flops_left, hours = (None if value is None else value * share for value in (flops, plan.hours))
    return CellCost(cell.name, state, steps, flops, flops_left, hours)


def _shape(cell: Cell) -> str:
    """Return a key that is equal for cells of equal cost: seed, learning rates and the kind of heads do not matter."""
    values = recipe_to_dict(cell.loaded)
    values.pop("seed", None)
    values.pop("optimizer", None)
    # Laplacian heads add no parameters; `operators` stays in the key, because other operators may add some.
    for key in ("laplacian_heads", "drop_path"):
        values.get("model", {}).pop(key, None)
    return json.dumps(values, sort_keys=True)


def _number(flops: float | None) -> str:
    return "-" if flops is None else f"{flops:.3e}"


def _hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:,.1f}"
