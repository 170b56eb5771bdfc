"""The paper's three tables with our runs in them, its numbers beside ours."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lapcli.recipe.chat import STAGES
from lapcli.report import paper
from lapcli.report.collect import RunResult
from lapcli.report.grouping import HEADS, RowKey, RunGrid, group
from lapcli.report.paper import data_set_of, recipe_differences, value_in_words
from lapcli.report.statistics import compare, summarise
from lapcli.report.tables import ScoreCell, ScoreColumn, ScoreRow, ScoreTable, cell_of, column_of, mark_best

DROP_PATH = "model.drop_path"
TABLES = ("table1", "table2", "table3")
NAMES = {0: "Baseline", 1: "1 Laplacian"}


@dataclass
class PaperColumn:
    """The sources of a column: a grid, the measure in it, and the paper's numbers."""

    column: ScoreColumn
    grid: RunGrid | None
    metric: str
    numbers: paper.Numbers


def paper_tables(which: str, runs: Sequence[RunResult], ddof: int | None = None) -> list[ScoreTable]:
    """Make the table, and for language models also one of the numbers that the paper gives in its text.

    Runs of a search are left out: they only chose values for the others.
    """
    used = 1 if ddof is None else ddof
    runs = [run for run in runs if not run.is_search]
    if which == "table1":
        return [_table1(runs, used)]
    if which == "table3":
        return [_table3(runs, used)]
    return [_table2(runs, used, "error" if ddof is None else "deviation"), _components(runs, used)]


def _table1(runs: Sequence[RunResult], ddof: int) -> ScoreTable:
    notes: list[str] = []
    sources = []
    for data_set, numbers in paper.CLASSIFICATION.items():
        own = [run for run in paper.runs_of("images", runs) if data_set_of(run) == data_set]
        grid = best_drop_path(data_set, _on_test_images(data_set, own, notes), notes)
        column = ScoreColumn(data_set, f"{data_set} (%)", True, "higher")
        sources.append(PaperColumn(column, grid, "top1", numbers))
        if grid is not None:
            notes += _differences(data_set, grid)
        else:
            notes.append(f"{data_set}: no runs.")
    return _table("Table 1: top-1 accuracy (%) of image classification", sources, ddof, notes)


def _on_test_images(data_set: str, runs: Sequence[RunResult], notes: list[str]) -> list[RunResult]:
    """Leave out runs whose top-1 was measured on held-out training images, which is not the paper's number."""
    on_test = [run for run in runs if not isinstance((run.recipe.get("data") or {}).get("validation"), float)]
    if len(on_test) < len(runs):
        left = len(runs) - len(on_test)
        notes.append(
            f"{data_set}: {left} run{'s were' if left > 1 else ' was'} measured on training images held out "
            "(data.validation), not on the test images, and left out."
        )
    return on_test


def best_drop_path(data_set: str, runs: Sequence[RunResult], notes: list[str]) -> RunGrid | None:
    """Return the grid at the drop path with the best baseline, as in the paper; add the choice to `notes`."""
    if not runs:
        return None
    family = _nearest(data_set, by_drop_path(runs), ["top1"], notes)
    baselines = {}
    for grid in family:
        summary = summarise(list(grid.values(grid.baseline, "top1").values()), 1) if grid.baseline else None
        if summary is not None:
            baselines[_drop_path(grid)] = summary.mean
    if not baselines:
        grid = max(family, key=lambda grid: len(grid.runs))
        notes.append(
            f"{data_set}: no baseline has a score; drop path {_drop_path(grid)} has the most runs and is shown."
        )
        return grid
    # By the baseline alone, as in table 1's caption: a choice by the best row would favour the Laplacian heads.
    best = max(baselines, key=lambda rate: baselines[rate])
    tried = ", ".join(f"{rate}: {value * 100:.2f}" for rate, value in sorted(baselines.items()))
    notes.append(
        f"{data_set}: drop path {best}, the one with the best baseline (top-1 of the baselines by drop path: {tried})."
    )
    return next(grid for grid in family if _drop_path(grid) == best)


def by_drop_path(runs: Sequence[RunResult]) -> list[list[RunGrid]]:
    """Return families of grids that differ only in the drop path, one grid for each rate."""
    families: dict[str, list[RunGrid]] = {}
    for grid in group(runs, [HEADS], []):
        rest = {key: value for key, value in grid.identity.items() if key != DROP_PATH}
        families.setdefault(repr(sorted(rest.items())), []).append(grid)
    return [sorted(grids, key=_drop_path) for grids in families.values()]


def _drop_path(grid: RunGrid) -> str:
    return grid.identity.get(DROP_PATH, "none")


def _nearest(what: str, families: Sequence[list[RunGrid]], metrics: Sequence[str], notes: list[str]) -> list[RunGrid]:
    """Return the family that can be compared, is nearest to the paper's recipe, has the most runs; in this order."""

    def is_comparison(grid: RunGrid) -> bool:
        scored = [[row for row in grid.rows if grid.values(row, metric)] for metric in metrics]
        return any(grid.baseline in rows and len(rows) > 1 for rows in scored)

    def rank(grids: list[RunGrid]) -> tuple[bool, int, int]:
        return not any(map(is_comparison, grids)), _distance(grids[0]), -sum(len(grid.runs) for grid in grids)

    ordered = sorted(families, key=rank)
    if len(ordered) > 1:
        left = "; ".join(
            f"{family[0].title} ({sum(len(grid.runs) for grid in family)} runs)" for family in ordered[1:4]
        )
        more = f"; and {len(ordered) - 4} more" if len(ordered) > 4 else ""
        notes.append(
            f"{what}: there are runs of {len(ordered)} recipes; the one nearest to the paper's that has a baseline and "
            f"another row is used. Not used: {left}{more}."
        )
    return ordered[0]


def _distance(grid: RunGrid) -> int:
    differences = recipe_differences(grid.runs[0])
    return 10_000 if differences is None else len(differences)


def _table2(runs: Sequence[RunResult], ddof: int, spread: Literal["deviation", "error"]) -> ScoreTable:
    """Make table 2, with standard errors, as the paper's own seem to be, unless `spread` says otherwise."""
    notes = [f"{paper.SPREAD} Ours are standard errors too." if spread == "error" else paper.SPREAD]
    # The paper evaluates after supervised fine-tuning, not after mid-training.
    own = [run for run in paper.runs_of("chat", runs) if run.recipe.get("stage") == STAGES[-1]]
    grid = nearest_grid("language", own, list(paper.LANGUAGE), notes)
    sources = [
        PaperColumn(replace(column_of(task), spread=spread), grid, task, numbers)
        for task, numbers in paper.LANGUAGE.items()
    ]
    if grid is None:
        notes.append("none of the runs is a fine-tuned language model (`lap sft`).")
    else:
        notes += _differences("language", grid)
        measured = grid.metrics()
        for task in paper.LANGUAGE:
            others = [name for name in measured if name.startswith(f"{task} [")]
            if others:
                notes.append(
                    f"{task}: not shown, because they were not measured by the paper's protocol: {', '.join(others)}."
                )
    table = _table("Table 2: accuracy (%) of language models", sources, ddof, notes, random=paper.RANDOM)
    _add_average(table, grid, ddof, spread)
    return table


def _add_average(table: ScoreTable, grid: RunGrid | None, ddof: int, spread: Literal["deviation", "error"]) -> None:
    """Add the plain mean over the five tasks of each run; a run that lacks one of them has no average."""
    column = ScoreColumn("average", "Avg", True, "higher", spread=spread)
    table.columns.append(column)
    baseline = averages(grid, grid.baseline) if grid and grid.baseline else {}
    # None is the row Random, which `_table` puts first.
    for row, key in zip(table.rows, [None, *_keys(grid, paper.LANGUAGE_AVERAGE)], strict=True):
        values = averages(grid, key) if grid and key in grid.rows else {}
        cell = ScoreCell(summarise(list(values.values()), ddof))
        cell.missing = [seed for seed in table.seeds if seed not in values] if values else []
        if key is not None:
            cell.paper = _papers_number(paper.LANGUAGE_AVERAGE, key)
            cell.paired = compare(values, baseline) if values and baseline and key.heads != 0 else None
        row.cells.append(cell)
    mark_best(table)


def averages(grid: RunGrid, row: RowKey) -> dict[str, float]:
    """Return the mean over the five tasks, by seed."""
    columns = [grid.values(row, task) for task in paper.LANGUAGE]
    shared = set.intersection(*(set(column) for column in columns))
    return {seed: sum(column[seed] for column in columns) / len(columns) for seed in columns[0] if seed in shared}


def _components(runs: Sequence[RunResult], ddof: int) -> ScoreTable:
    """Make the table of k_0.99, of the pretrained models or of the stage that was analyzed."""
    metric = "spectrum.k_0.99"
    notes: list[str] = []
    own = [run for run in paper.runs_of("language", runs) if metric in run.numbers]
    grid = nearest_grid("k_0.99", own, [metric], notes)
    if grid is None:
        notes.append("no language model has been analyzed; use `lap analyze spectrum --runs PATTERN`.")
    else:
        notes += _differences("k_0.99", grid)
    column = ScoreColumn(metric, "k_0.99", False, None, 1)
    return _table(
        "Section 4.2: components for 99% of the variance of a language model's tokens",
        [PaperColumn(column, grid, metric, paper.COMPONENTS)],
        ddof,
        notes,
    )


def _table3(runs: Sequence[RunResult], ddof: int) -> ScoreTable:
    notes: list[str] = []
    own = [run for run in paper.runs_of("self-supervised", runs) if data_set_of(run) == "ImageNet"]
    grid = nearest_grid("self-supervised", own, list(paper.SELF_SUPERVISED), notes)
    if grid is None:
        notes.append("no self-supervised runs on ImageNet.")
    else:
        notes += _differences("self-supervised", grid)
    labels = {"linear": "ImageNet Top-1 (%)", "ade20k": "ADE20K mIoU (%)"}
    sources = [
        PaperColumn(ScoreColumn(task, labels[task], True, "higher"), grid, task, numbers)
        for task, numbers in paper.SELF_SUPERVISED.items()
    ]
    return _table("Table 3: linear probes of self-supervised ViT-S", sources, ddof, notes)


def nearest_grid(what: str, runs: Sequence[RunResult], metrics: Sequence[str], notes: list[str]) -> RunGrid | None:
    """Return the grid nearest to the paper's recipe, preferring those that can be compared in these measures."""
    grids = group(runs, [HEADS], [])
    return _nearest(what, [[grid] for grid in grids], metrics, notes)[0] if grids else None


def _differences(what: str, grid: RunGrid) -> list[str]:
    differences = recipe_differences(grid.runs[0])
    if differences is None:
        return [f"{what}: the paper has no recipe for these runs, so differences from it are not known."]
    if not differences:
        return []
    shown = ", ".join(
        f"{key} {value_in_words(ours)} (paper: {value_in_words(theirs)})" for key, theirs, ours in differences[:6]
    )
    more = f" and {len(differences) - 6} more" if len(differences) > 6 else ""
    return [f"{what}: NOT the paper's recipe, {len(differences)} keys differ: {shown}{more}."]


def _table(
    title: str, sources: Sequence[PaperColumn], ddof: int, notes: list[str], random: dict[str, float] | None = None
) -> ScoreTable:
    keys = sorted({key for source in sources for key in _keys(source.grid, source.numbers)})
    rows = []
    if random is not None:
        chances = [ScoreCell(paper=(random[source.metric], None)) for source in sources]
        rows.append(ScoreRow("Random", chances, is_given=True))
    for key in keys:
        cells = []
        for source in sources:
            grid = source.grid
            is_ours = grid is not None and key in grid.rows
            cell = cell_of(grid, key, source.metric, ddof, grid.baseline) if grid and is_ours else ScoreCell()
            cell.paper = _papers_number(source.numbers, key)
            cells.append(cell)
        rows.append(ScoreRow(_row_name(key), cells, key.heads == 0))
    seeds = list(dict.fromkeys(seed for source in sources if source.grid for seed in source.grid.seeds))
    columns = [source.column for source in sources]
    table = ScoreTable(title, "Model", columns, rows, ddof, seeds, notes, "Baseline", has_paper=True)
    mark_best(table)
    return table


def _keys(grid: RunGrid | None, numbers: paper.Numbers) -> list[RowKey]:
    """Return the paper's rows and ours; a plan that differs by layer is a row of its own, sorted by its mean."""
    return sorted({*map(RowKey.of_heads, numbers), *(grid.rows if grid else ())})


def _papers_number(numbers: paper.Numbers, key: RowKey) -> tuple[float, float | None] | None:
    return None if key.heads is None else numbers.get(key.heads)


def _row_name(key: RowKey) -> str:
    return key.label if key.heads is None else NAMES.get(key.heads, f"{key.heads} Laplacians")
