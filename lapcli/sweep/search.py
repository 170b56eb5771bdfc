"""The choice of a search: the values whose run has the best last validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lapcli.runtime.errors import LapError, UsageError
from lapcli.sweep.grid import Cell, SearchSpec
from lapcli.sweep.state import last_validation, progress
from lapcli.sweep.sweep import Sweep


@dataclass(frozen=True)
class Choice:
    values: Mapping[str, Any]
    cell: str
    score: float
    by: str
    compared: int
    diverged: int
    runner_up: float | None

    def __str__(self) -> str:
        values = " ".join(f"{key}={value}" for key, value in self.values.items())
        text = f"{values}: {self.by} {self.score:.4f}, the best of {self.compared} ({self.cell})"
        if self.runner_up is not None:
            text += f"; next {self.runner_up:.4f}"
        return text + (f"; {self.diverged} diverged" if self.diverged else "")


def is_tried(cell: Cell, runs_dir: Path) -> bool:
    """Whether it is trained or has diverged: a rate at which the loss explodes is not the best one."""
    training = progress(cell, runs_dir)
    return training.is_trained or training.diverged


def choose(cells: Sequence[Cell], search: SearchSpec, runs_dir: Path) -> Choice | None:
    """The best cell's values, the first of equals; None while cells are left to be tried."""
    scores: list[tuple[float, Cell]] = []
    for cell in cells:
        if not progress(cell, runs_dir).is_trained:
            continue
        numbers = last_validation(cell, runs_dir)
        if search.by not in numbers:
            raise LapError(
                f"the validation of {cell.name} does not give {search.by}; `by` may be "
                f"{', '.join(numbers) or 'nothing, because it was not validated'}"
            )
        if math.isfinite(numbers[search.by]):
            scores.append((float(numbers[search.by]), cell))
    if not all(is_tried(cell, runs_dir) for cell in cells):
        return None
    if not scores:
        raise LapError(f"all {len(cells)} runs of the search diverged; add lower learning rates to it")
    ordered = sorted(scores, key=lambda scored: scored[0], reverse=search.best == "highest")
    score, best = ordered[0]
    return Choice(
        values=best.values,
        cell=best.name,
        score=score,
        by=search.by,
        compared=len(cells),
        diverged=len(cells) - len(scores),
        runner_up=ordered[1][0] if len(ordered) > 1 else None,
    )


def known_cells(sweep: Sweep, runs_dir: Path, only: str | None = None) -> list[tuple[Cell, bool]]:
    """Every cell once, and whether it waits for a search; such a grid is shown with the recipe's own values."""
    cells: dict[str, tuple[Cell, bool]] = {}
    for grid in sweep.grids:
        searched = grid.search_cells()
        choice = choose(searched, grid.search, runs_dir) if grid.search else None
        waits = grid.search is not None and choice is None
        for cell in searched:
            cells.setdefault(cell.name, (cell, False))
        for cell in grid.cells(choice.values if choice else None):
            cells.setdefault(cell.name, (cell, waits))
    wanted = [known for name, known in cells.items() if only is None or fnmatchcase(name, only)]
    if not wanted:
        raise UsageError(f"no cell is called {only}; --dry-run lists the cells")
    return wanted


def startable_cells(sweep: Sweep, runs_dir: Path, only: str | None = None) -> list[Cell]:
    """The cells that can be started now, and those that a search may lead to and whose names are taken.

    For a check before the first start: after the search it would be too late.
    """
    cells = {cell.name: cell for cell, waits in known_cells(sweep, runs_dir, only) if not waits}
    taken = lambda name: (only is None or fnmatchcase(name, only)) and (runs_dir / name).exists()  # noqa: E731
    for grid in sweep.grids:
        if grid.search is not None and choose(grid.search_cells(), grid.search, runs_dir) is None:
            for choice in grid.choices():
                cells |= {cell.name: cell for cell in grid.cells(choice, taken)}
    return list(cells.values())
