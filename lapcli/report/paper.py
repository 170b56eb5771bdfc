"""The paper's own numbers (`paper.yaml`), its three tables with our runs in them, and which runs are of its recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lapcli.recipe.chat import STAGES
from lapcli.report.collect import Grid, RowKey
from lapcli.report.statistics import summarise
from lapcli.report.tables import LABELS, Cell, Column, Row, ScoreTable, cell, cell_of, mark_best
from lapcli.same_recipe import DROP_PATH, Difference

Numbers = dict[int, tuple[float, float | None]]  # by Laplacian heads: mean and ±

_PAPER: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TABLES = ("table1", "table2", "table3")


def _numbers(values: Mapping[int, Any]) -> Numbers:
    return {heads: tuple(value) if isinstance(value, list) else (value, None) for heads, value in values.items()}


CLASSIFICATION = {data_set: _numbers(values) for data_set, values in _PAPER["table1"].items()}
LANGUAGE = {task: _numbers(values) for task, values in _PAPER["table2"].items()}
LANGUAGE_AVERAGE = _numbers(_PAPER["average"])
RANDOM: dict[str, float] = _PAPER["random"]
SELF_SUPERVISED = {task: _numbers(values) for task, values in _PAPER["table3"].items()}
COMPONENTS = _numbers(_PAPER["components"])
EXPERIMENTS: dict[str, dict[str, Any]] = _PAPER["experiments"]


def differences(grid: Grid) -> list[Difference] | None:
    """Return differences from the paper's recipe; one run represents the grid, whose recipes agree."""
    return grid.first.paper_differences


def is_papers(grid: Grid) -> bool:
    return differences(grid) == []  # not `not ...`: None means that the paper has no such recipe


def families(grids: Sequence[Grid]) -> list[list[Grid]]:
    """Return grids that differ only in the drop path together, one for each rate."""
    by_rest: dict[str, list[Grid]] = {}
    for grid in grids:
        rest = {key: value for key, value in grid.identity.items() if key != DROP_PATH}
        by_rest.setdefault(repr(sorted(rest.items())), []).append(grid)
    return [sorted(family, key=drop_path) for family in by_rest.values()]


def drop_path(grid: Grid) -> str:
    return grid.identity.get(DROP_PATH, "none")


def best_baseline(family: Sequence[Grid], measure: str = "top1") -> Grid | None:
    """Return the grid at the drop path with the best baseline, as in the paper: a choice by the best row would favour
    Laplacian heads. None if no baseline has a score."""
    means = {}
    for number, grid in enumerate(family):
        summary = summarise(list(grid.values(grid.baseline, measure).values())) if grid.baseline else None
        if summary is not None:
            means[number] = summary.mean
    return family[max(means, key=lambda number: means[number])] if means else None


def paper_tables(which: str, grids: Sequence[Grid]) -> list[ScoreTable]:
    """Make one of the paper's tables; for language models also one of the numbers that the paper gives in its text."""
    if which == "table1":
        return [_table1(grids)]
    if which == "table3":
        notes: list[str] = []
        own = [grid for grid in of("self-supervised", grids) if grid.first.data_set == "ImageNet"]
        grid = _nearest("self-supervised", [[each] for each in own], notes)
        columns = [(task, "fraction", task, numbers) for task, numbers in SELF_SUPERVISED.items()]
        return [_table("Table 3: linear probes of self-supervised ViT-S", grid and grid[0], columns, notes)]
    return [_table2(grids), _components(grids)]


def of(experiment: str, grids: Sequence[Grid]) -> list[Grid]:
    return [grid for grid in grids if grid.first.objective in EXPERIMENTS[experiment]["objectives"]]


def _table1(grids: Sequence[Grid]) -> ScoreTable:
    notes: list[str] = []
    columns, chosen = [], []
    for data_set, numbers in CLASSIFICATION.items():
        own = [grid for grid in of("images", grids) if grid.first.data_set == data_set]
        on_test = [grid for grid in own if not isinstance(grid.first.values.get("data.validation"), float)]
        if len(on_test) < len(own):
            left = sum(len(grid.runs) for grid in own) - sum(len(grid.runs) for grid in on_test)
            notes.append(f"{data_set}: {left} runs were measured on held-out training images and are left out.")
        family = _nearest(data_set, families(on_test), notes)
        grid = family and (best_baseline(family) or max(family, key=lambda grid: len(grid.runs)))
        if grid and family and len(family) > 1:
            notes.append(f"{data_set}: drop path {drop_path(grid)}, the one with the best baseline.")
        columns.append((data_set, "fraction", "top1", numbers))
        chosen.append(grid or None)
    return _table("Table 1: top-1 accuracy of image classification", chosen, columns, notes)


def _table2(grids: Sequence[Grid]) -> ScoreTable:
    """Make table 2, with standard errors, as the paper's own seem to be, and the average over the five tasks."""
    notes = [f"{_PAPER['spread']} Ours are standard errors too."]
    # The paper evaluates after supervised fine-tuning, not after mid-training.
    own = [grid for grid in of("chat", grids) if grid.first.values.get("stage") == STAGES[-1]]
    family = _nearest("language", [[grid] for grid in own], notes)
    grid = family[0] if family else None
    columns = [(task, "fraction", task, numbers) for task, numbers in LANGUAGE.items()]
    others = [name for name in (grid.measures() if grid else []) if name.split(" [")[0] in LANGUAGE and " [" in name]
    notes += [f"not shown, because it was not measured by the paper's protocol: {name}." for name in others]
    table = _table("Table 2: accuracy of language models", grid, columns, notes)
    table.rows.insert(0, Row("Random", [Cell(paper=(RANDOM[task], None)) for task in LANGUAGE], is_given=True))
    table.columns = [replace(column, spread="error") for column in table.columns]
    table.columns.append(Column("average", "Avg (%)", "fraction", "higher", spread="error"))
    baseline = averages(grid, grid.baseline) if grid and grid.baseline else {}
    for row, key in zip(table.rows, [None, *_keys(grid, LANGUAGE_AVERAGE)], strict=True):
        made = cell(averages(grid, key) if grid and key else {}, {} if row.is_baseline else baseline)
        made.paper = LANGUAGE_AVERAGE.get(key.heads) if key and key.heads is not None else None
        row.cells.append(made)
    mark_best(table)
    return table


def averages(grid: Grid, row: RowKey) -> dict[str, float]:
    """Return the mean over the five tasks by seed; a run that lacks a task has no average."""
    columns = [grid.values(row, task) for task in LANGUAGE]
    shared = set.intersection(*(set(column) for column in columns))
    return {seed: sum(column[seed] for column in columns) / len(columns) for seed in columns[0] if seed in shared}


def _components(grids: Sequence[Grid]) -> ScoreTable:
    """Make the table of k_0.99 for the pretrained models or the analysed chat stage."""
    measure = "spectrum.k_0.99"
    notes: list[str] = []
    own = [grid for grid in of("language", grids) if measure in grid.measures()]
    family = _nearest("k_0.99", [[grid] for grid in own], notes)
    title = "Section 4.2: components for 99% of the variance of a language model's tokens"
    return _table(title, family and family[0], [("k_0.99", None, measure, COMPONENTS)], notes)


def _nearest(what: str, choices: Sequence[list[Grid]], notes: list[str]) -> list[Grid] | None:
    """Return the family nearest to the paper's recipe; among equally near families, the one with the most runs."""

    def rank(family: list[Grid]) -> tuple[int, int]:
        changed = differences(family[0])
        return 10_000 if changed is None else len(changed), -sum(len(grid.runs) for grid in family)

    if not choices:
        notes.append(f"{what}: no runs.")
        return None
    family, *others = sorted(choices, key=rank)
    if others:
        notes.append(f"{what}: the recipe nearest to the paper's is shown; name the runs of another to see it.")
    if changed := differences(family[0]):
        shown = ", ".join(f"{key} {in_words(ours)} (paper: {in_words(theirs)})" for key, theirs, ours in changed[:6])
        notes.append(f"{what}: NOT the paper's recipe, {len(changed)} keys differ: {shown}.")
    return family


def in_words(value: Any) -> str:
    """Return the value roughly as a recipe would write it; for a mixture of data sets, their names and rows."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and "name" in part for part in value):
        return ", ".join(str(part["name"]) + (f" ({part['rows']:,})" if part.get("rows") else "") for part in value)
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _table(
    title: str,
    grids: Sequence[Grid | None] | Grid | None,
    columns: Sequence[tuple[str, str | None, str, Numbers]],
    notes: list[str],
) -> ScoreTable:
    """Make a table of (label, unit, measure, the paper's numbers), each from its own grid or all from one."""
    each = [grids] * len(columns) if grids is None or isinstance(grids, Grid) else list(grids)
    sources = list(zip(each, columns, strict=True))
    keys = sorted({key for grid, (_, _, _, numbers) in sources for key in _keys(grid, numbers)})
    rows = []
    for key in keys:
        cells = []
        for grid, (_, _, measure, numbers) in sources:
            made = cell_of(grid, key, measure, grid.baseline) if grid and key in grid.rows else Cell()
            made.paper = None if key.heads is None else numbers.get(key.heads)
            cells.append(made)
        rows.append(Row(_row_name(key), cells, key.heads == 0))
    shown = []
    for _, (name, unit, _, _) in sources:
        label = LABELS.get(name, name) + (" (%)" if unit else "")
        shown.append(Column(name, label, unit, "higher" if unit else None, 2 if unit else 1))
    seeds = list(dict.fromkeys(seed for grid in each if grid for seed in grid.seeds))
    table = ScoreTable(title, "Model", shown, rows, seeds, notes, "Baseline", has_paper=True)
    mark_best(table)
    return table


def _keys(grid: Grid | None, numbers: Numbers) -> list[RowKey]:
    """Return the paper's rows and ours; a plan that differs by layer is a separate row, sorted by its mean."""
    return sorted({*map(RowKey.of_heads, numbers), *(grid.rows if grid else ())})


def _row_name(key: RowKey) -> str:
    if key.heads is None:
        return key.label
    return {0: "Baseline", 1: "1 Laplacian"}.get(key.heads, f"{key.heads} Laplacians")
