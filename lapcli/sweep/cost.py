"""What the cells of a sweep would cost, before anything starts: `lap sweep --dry-run`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lapcli.errors import UsageError
from lapcli.planning import plan_training
from lapcli.recipe import recipe_to_dict
from lapcli.sweep.cells import Cell, Sweep
from lapcli.sweep.search import known_cells
from lapcli.sweep.state import commands_left, progress
from lapcli.sweep.table import aligned


@dataclass(frozen=True)
class CellCost:
    cell: str
    state: str
    steps: int | None  # none: so many epochs of data that was not looked at
    flops: float | None
    flops_left: float | None


@dataclass(frozen=True)
class SweepCost:
    cells: list[CellCost]

    @property
    def flops(self) -> float:
        return sum(cost.flops or 0 for cost in self.cells)

    @property
    def flops_left(self) -> float:
        return sum(cost.flops_left or 0 for cost in self.cells)

    def to_text(self) -> str:
        rows = [("cell", "state", "steps", "FLOPs", "left")]
        for cost in self.cells:
            steps = "by epochs" if cost.steps is None else f"{cost.steps:,}"
            rows.append((cost.cell, cost.state, steps, _number(cost.flops), _number(cost.flops_left)))
        unknown = sum(cost.flops is None for cost in self.cells)
        rows.append(("in all", "", "", _number(self.flops), _number(self.flops_left)))
        left = sum(cost.state != "finished" for cost in self.cells)
        text = f"{len(self.cells)} cells, {left} to do" + (f"; {unknown} of unknown cost" if unknown else "")
        return "\n".join([*aligned(rows), "", text])

    def to_json(self) -> str:
        cells = [asdict(cost) for cost in self.cells]
        return json.dumps({"cells": cells, "flops": self.flops, "flops_left": self.flops_left}, indent=2)


def sweep_cost(sweep: Sweep, runs_dir: Path, only: str | None = None) -> SweepCost:
    """Of every cell; a grid whose search is not through is counted with the recipe's own values."""
    known: dict[str, tuple[int | None, float | None]] = {}
    return SweepCost([_cost(cell, waits, runs_dir, known) for cell, waits in known_cells(sweep, runs_dir, only)])


def _cost(cell: Cell, waits: bool, runs_dir: Path, known: dict[str, tuple[int | None, float | None]]) -> CellCost:
    shape = _shape(cell)
    if shape not in known:
        try:
            plan = plan_training(cell.loaded)
            known[shape] = plan.steps, plan.flops
        except UsageError:  # a kind of recipe without a plan
            known[shape] = cell.loaded.train.steps, None
    steps, flops = known[shape]
    found = progress(cell, runs_dir)
    state = "after the search" if waits else found.status
    if found.is_trained and commands_left(cell, runs_dir):
        state = "trained"
    share = 0.0 if found.is_trained else 1 - found.step / steps if steps else 1.0
    return CellCost(cell.name, state, steps, flops, None if flops is None else flops * share)


def _shape(cell: Cell) -> str:
    """Cells that multiply the same matrices cost the same: neither seed nor rates nor the kind of heads matter."""
    values = recipe_to_dict(cell.loaded)
    values.pop("seed", None)
    values.pop("optimizer", None)
    for key in ("laplacian_heads", "drop_path"):
        values.get("model", {}).pop(key, None)
    return json.dumps(values, sort_keys=True)


def _number(flops: float | None) -> str:
    return "-" if flops is None else f"{flops:.3e}"
