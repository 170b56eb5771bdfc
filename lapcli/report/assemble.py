"""Makes tables from runs: chooses columns and baseline, and collects notes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lapcli.recipe import OBJECTIVES
from lapcli.report.collect import Collection, RunResult, Which, collect
from lapcli.report.costs import COSTS, cost_columns, has_operators
from lapcli.report.grouping import (
    DATA,
    HEADS,
    RowKey,
    RunGrid,
    differences,
    group,
    in_words,
    key_in_words,
    same_training,
)
from lapcli.report.tables import LABELS, ScoreTable, table_of
from lapcli.runtime.errors import UsageError

ROW_NAMES = {HEADS: "Laplacian heads"}


@dataclass
class Report:
    collection: Collection
    grids: list[RunGrid]
    tables: list[ScoreTable]
    rows: list[str]
    notes: list[str] = field(default_factory=list)

    def tables_of_grids(self) -> list[tuple[RunGrid, ScoreTable]]:
        """Return each grid that has a table, with its table."""
        # By title, which no two grids share; a grid without a column to show has no table.
        by_title = {table.title: table for table in self.tables}
        return [(grid, by_title[grid.title]) for grid in self.grids if grid.title in by_title]

    def gaps(self) -> list[str]:
        return [gap for table in self.tables for gap in table.gaps()]


def report_on(
    names: Sequence[str],
    runs_dir: Path,
    *,
    rows: Sequence[str] = (HEADS,),
    columns: Sequence[str] | None = None,
    baseline: str | None = None,
    which: Which = "last",
    ddof: int = 1,
) -> Report:
    """Make a table for each grid of the runs."""
    collection = collect(names, runs_dir, which)
    notes = collection.notes
    grids = group(_results(collection.runs, names, notes), rows, notes)
    notes += describe_differences(grids)
    chosen = _columns(grids, columns, notes)
    tables = []
    for grid, metrics in zip(grids, chosen, strict=True):
        if metrics:
            row_name = ", ".join(ROW_NAMES.get(key, key) for key in rows)
            tables.append(table_of(grid, metrics, row_name, ddof, baseline_of(grid, baseline)))
    if baseline is not None and not any(table.baseline == baseline for table in tables):
        labels = ", ".join(dict.fromkeys(row.label for table in tables for row in table.rows))
        raise UsageError(f"--baseline: no row is called {baseline[:60]!r}; the rows are {labels}")
    return Report(collection, grids, tables, list(rows), notes)


def _results(runs: Sequence[RunResult], names: Sequence[str], notes: list[str]) -> list[RunResult]:
    """Leave out runs of searches, unless they were named one by one or there are no others."""
    named = {Path(name).name for name in names}
    shown = [run for run in runs if not run.is_search or run.name in named]
    left = [run.name for run in runs if run.is_search and run.name not in named]
    if shown and left:
        more = ", ..." if len(left) > 3 else ""
        notes.append(
            f"{len(left)} runs of a search are not results and are not shown ({', '.join(left[:3])}{more}); "
            "name a run to see it"
        )
    return shown or list(runs)


def baseline_of(grid: RunGrid, asked: str | None) -> RowKey | None:
    if asked is None:
        return grid.baseline
    return next((row for row in grid.rows if row.label == asked), None)


def describe_differences(grids: Sequence[RunGrid]) -> list[str]:
    """Explain why runs of one kind on the same data are in several tables: the keys in which they differ."""
    lines = []
    for alike in same_training(grids):
        differing = differences(alike)
        if not differing:
            continue
        keys = sorted(differing, key=lambda key: key != DATA)  # the data first, because the list may be cut
        parts = [f"{key_in_words(key)}: {', '.join(dict.fromkeys(map(in_words, differing[key])))}" for key in keys]
        shown = "; ".join(parts[:12])
        more = f"; and {len(keys) - 12} more" if len(keys) > 12 else ""
        lines.append(
            f"{sum(len(grid.runs) for grid in alike)} runs of {alike[0].objective} are in {len(alike)} tables, not "
            f"averaged together, because they differ in {shown}{more}"
        )
    return lines


def _columns(grids: Sequence[RunGrid], asked: Sequence[str] | None, notes: list[str]) -> list[list[str]]:
    """Return the columns of each grid, without measures that its kind of run cannot have."""
    if asked is None:
        costs = [cost_columns(grid) if has_operators(grid) else [] for grid in grids]
        return [[*_default(grid, notes), *its_costs] for grid, its_costs in zip(grids, costs, strict=True)]
    available = list(dict.fromkeys(name for grid in grids for name in grid.metrics()))
    chosen: list[list[str]] = [[] for _ in grids]
    for name in asked:
        if name == COSTS:
            for grid, columns in zip(grids, chosen, strict=True):
                columns += [cost for cost in cost_columns(grid) if cost not in columns]
            continue
        having = {grid.objective for grid in grids if resolve(name, grid.metrics())}
        # A known score that nobody has measured yet is a column of gaps, not a typing error.
        if not having and name not in LABELS:
            listed = ", ".join(available[:20]) + (", ..." if len(available) > 20 else "")
            raise UsageError(f"--columns: no run has a number {name[:60]!r}; there are {listed or 'none yet'}")
        for grid, columns in zip(grids, chosen, strict=True):
            if not having or grid.objective in having:
                columns += [full for full in resolve(name, grid.metrics()) or [name] if full not in columns]
    return chosen


def resolve(name: str, available: Sequence[str]) -> list[str]:
    """Return a measure's full names: `k_0.99` is `spectrum.k_0.99`, `arc_easy` also `arc_easy [limit 100]`."""
    for matches in (
        [full for full in available if full == name],
        [full for full in available if full.split(" [")[0] == name],
        [full for full in available if full.split(" [")[0].partition(".")[2] == name],
    ):
        if matches:
            return matches
    return []


def _default(grid: RunGrid, notes: list[str]) -> list[str]:
    """Return what `lap eval` measured, in the order of the tasks; without any, the validation at the end of training.

    Scores under other conditions (fewer examples, another protocol) are shown only if there are no others; a score on a
    few examples (`--limit`) does not even replace the validation. A grid without any number shows the scores that its
    kind of training should have, as gaps.
    """
    names = [name for name in grid.metrics() if "." not in name.split(" [")[0]]
    order = list(LABELS)
    measured = [name for name in names if not name.startswith("validation_")]
    has_whole = any("[limit " not in name for name in names)
    aside = [
        name
        for name in measured
        if (" [" in name and name.split(" [")[0] in measured) or ("[limit " in name and has_whole)
    ]
    notes += [f"{grid.title}: {name} is not shown; ask for it with --columns" for name in aside]
    shown = [name for name in measured if name not in aside]
    shown.sort(key=lambda name: order.index(name) if name in order else len(order))
    kind = OBJECTIVES[grid.objective]
    return (
        shown or [name for name in names if name not in aside] or list(kind.expected_scores) or list(kind.metrics)[:1]
    )
