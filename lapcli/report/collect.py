"""The runs of a report and their numbers: one data frame, grouped into grids of runs that may be averaged.

A number's name, its `measure`, gives the quantity and the conditions:

    top1, arc_easy, linear ...       the score of a task; its other metrics are `arc_easy.acc_norm`
    validation_loss ...              the validation of the training
    spectrum.k_0.99, snr.snr ...     an analysis, in the last layer of the model
    arc_easy [limit 100]             measured under another condition: another column, never averaged with the first

Runs that agree in everything except the seed and the row keys form one grid, with one table (`same_recipe`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.recipe import canonical_json, recipe_to_dict
from lapcli.recipe.schema import CHAT
from lapcli.result_rows import find_paths, results
from lapcli.runs import SWEEP, Run, read_run, time_of
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import read_json
from lapcli.same_recipe import (
    HEADS,
    OPERATORS,
    Difference,
    WholeRecipe,
    data_set_of,
    leaves,
    paper_differences,
    whole_recipe,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series

DATA = "data sha256"  # a key of a grid beside those of the recipe


@dataclass
class ReportRun:
    run: Run
    whole: WholeRecipe

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def objective(self) -> str:
        return self.run.recipe.objective

    @property
    def seed(self) -> str:
        """The seeds of all stages: `0`, or for a chat run `1+42+42`, pretraining first."""
        return "+".join(self.whole.seeds)

    @property
    def data_set(self) -> str | None:
        return data_set_of(self.whole.keys, self.run.info)

    @cached_property
    def paper_differences(self) -> list[Difference] | None:
        """Differences from the paper's recipe; None if the paper has no such recipe."""
        return paper_differences(self.run)

    @cached_property
    def values(self) -> dict[str, Any]:
        """All keys of the recipe and of earlier stages."""
        return {**self.whole.keys, **dict(leaves(recipe_to_dict(self.run.recipe)))}

    @cached_property
    def identity(self) -> dict[str, str]:
        """The values that averaged runs must share, as JSON; also the data, unless its identity includes the seed."""
        keys = {key: canonical_json(key, value) for key, value in self.whole.keys.items()}
        if not self.run.recipe.data_identity_has_seed and self.run.info.get("data_sha256"):
            keys[DATA] = json.dumps(str(self.run.info["data_sha256"])[:16])
        return keys


@dataclass(frozen=True, order=True)
class RowKey:
    """A row's value, which sorts numerically if it is a number."""

    order: tuple[float, ...]
    label: str

    @property
    def heads(self) -> int | None:
        """The number of Laplacian heads in every layer, in rows by heads; None if the plan differs by layer."""
        return int(self.label) if self.label.isdecimal() else None

    @classmethod
    def of_heads(cls, number: int) -> "RowKey":
        return cls((float(number),), str(number))

    @classmethod
    def of(cls, run: ReportRun, rows: Sequence[str]) -> "RowKey":
        orders, labels = [], []
        for key in rows:
            value = run.values.get(key)
            order, label = float("inf"), value if isinstance(value, str) else json.dumps(value)
            if key == HEADS and value is not None:  # one label for `3` and `[3, 3, 3, 3]`
                model: Any = run.run.recipe.model  # type: ignore[attr-defined]
                plan = model.head_plan()
                order, label = sum(plan.counts().values()) / len(plan.layers), plan.label()
                order += 0 if plan.is_laplacian else plan.heads  # other operators come after all Laplacian plans
            elif isinstance(value, int | float):
                order, label = float(value), f"{value:g}" if isinstance(value, float) else str(value)
            orders.append(order)
            labels.append(label)
        return cls(tuple(orders), ", ".join(labels))


@dataclass
class Grid:
    """Runs that differ only in row keys and seeds: the content of one table."""

    identity: dict[str, str]
    rows_by: tuple[str, ...]
    rows: dict[RowKey, dict[str, ReportRun]] = field(default_factory=dict)  # by seed
    title: str = ""
    frame: Any = None  # the rows of results of these runs, with `measure`, `row` and `seeds`

    @property
    def runs(self) -> list[ReportRun]:
        return [run for row in self.rows.values() for run in row.values()]

    @property
    def first(self) -> ReportRun:
        return self.runs[0]

    @property
    def seeds(self) -> list[str]:
        return list(dict.fromkeys(seed for row in self.rows.values() for seed in row))

    @property
    def baseline(self) -> RowKey | None:
        """The row without Laplacian heads; None if the rows are not by heads, or if several rows have none."""
        place = self.rows_by.index(HEADS) if HEADS in self.rows_by else None
        without = [row for row in self.rows if place is not None and row.order[place] == 0]
        return without[0] if len(without) == 1 else None

    @cached_property
    def wide(self) -> "DataFrame":
        """Numbers by (row, seeds) and measure; NaN is a gap."""
        kept = self.frame.drop_duplicates(["row", "seeds", "measure"], keep="last")
        return kept.set_index(["row", "seeds", "measure"])["value"].unstack("measure")

    def values(self, row: RowKey, measure: str) -> dict[str, float]:
        """Return the numbers of a row by seed, without runs that lack it."""
        if measure not in self.wide or row.label not in self.wide.index.get_level_values(0):
            return {}
        return self.wide[measure][row.label].dropna().to_dict()

    def measures(self) -> list[str]:
        return list(dict.fromkeys(self.frame["measure"]))

    def about(self, measure: str) -> "Series | None":
        """Return one of the measure's rows of results, for its unit and direction."""
        rows = self.frame[self.frame["measure"] == measure]
        return None if rows.empty else rows.astype(object).where(rows.notna(), None).iloc[0]


@dataclass
class Collection:
    runs: list[ReportRun]
    frame: "DataFrame"
    notes: list[str]


def collect(names: Sequence[str], runs_dir: Path) -> Collection:
    """Read runs by name, folder or pattern, with the numbers of their final weights; only finished runs count."""
    paths = find_paths(names, runs_dir)
    if not paths:
        raise UsageError(f"{runs_dir} has no runs to report on; name runs, or choose another --runs-dir")
    notes = []
    named = {Path(name).name for name in names}
    searches = [path for path in paths if path.name not in named and _is_search(path)]
    if searches and len(searches) < len(paths):
        notes.append(f"{len(searches)} runs of a search are not results and are not shown; name a run to see it")
        paths = [path for path in paths if path not in searches]
    runs = [ReportRun(run, whole_recipe(run)) for run in map(read_run, paths)]
    for each in runs:
        info = each.run.info
        if not each.run.is_finished:
            why = f": {info['failure']}" if info.get("failure") else ""
            done = f"step {info.get('step', 0)} of {info.get('steps', '?')}"
            notes.append(f"{each.name} is {each.run.status} at {done}{why}; it counts as a gap")
        if each.whole.missing:
            notes.append(f"{each.name} started from {each.whole.missing}, which is missing and not compared")
    return Collection(runs, _numbers(runs, [str(path) for path in paths], notes), notes)


def _is_search(path: Path) -> bool:
    """Return whether a sweep used the run to choose values for others."""
    file = path / SWEEP
    return file.is_file() and read_json(file, "remove it and run the sweep again").get("search") is True


def _numbers(runs: Sequence[ReportRun], paths: Sequence[str], notes: list[str]) -> "DataFrame":
    """Return the finite numbers of the final weights, with `measure`."""
    import numpy as np
    import pandas

    frame = results(paths)
    frame["value"] = pandas.to_numeric(frame["value"], errors="coerce").replace([np.inf, -np.inf], np.nan)
    by_name = {run.name: run for run in runs}
    frame = frame[frame["run"].map(lambda name: by_name[name].run.is_finished).astype(bool)]
    chosen = (frame["task"] == "training") | (frame["checkpoint"] == "last")
    measured = frame[~chosen & (frame["task"] != "validation")]
    for (run, task, step), _ in measured.groupby(["run", "task", "step"], dropna=False):
        notes.append(f"{run}: {task} of step {step} does not belong to the final weights and is left out")
    frame = frame[chosen & frame["value"].notna()].copy()
    frame["seeds"] = frame["run"].map({run.name: run.seed for run in runs})
    mains = {key: _main(list(metrics)) for key, metrics in frame.groupby(["run", "task"])["metric"]}
    rows = frame.astype(object).where(frame.notna(), None)  # NaN is None
    names = [_measure(each, by_name[each["run"]], mains) for each in rows.to_dict("records")]
    frame["measure"] = pandas.Series(names, index=frame.index, dtype=object)
    return frame


def _main(metrics: Sequence[str]) -> str:
    """Return the metric that is the score of its task: pass@k with the largest k, else the first one listed."""
    sampled = [name for name in metrics if name.startswith("pass@")]
    return max(sampled, key=lambda name: int(name[5:])) if sampled else metrics[0]


def _measure(row: dict[str, Any], run: ReportRun, mains: dict[Any, str]) -> str:
    """Return the number's name, with non-default conditions."""
    task, metric, layer = row["task"], row["metric"], row["layer"]
    if task == "training":
        return str(metric)
    if task == "validation":
        return f"validation_{metric}"
    conditions = [] if row["limit"] is None else [f"limit {int(row['limit'])}"]
    if layer is not None:
        name, last = f"{task}.{metric}", run.values.get("model.layers")
        conditions += [f"layer {int(layer)}"] if last is None or layer != last - 1 else []
        usual: tuple[Any, ...] = ("validation",)
    else:
        main = mains[row["run"], task]
        name = task if metric in (task, main) else f"{task}.{metric}"
        conditions += [metric] if metric.startswith("pass@") and metric == main != "pass@10" else []
        usual = ("validation", "test")
        protocol = "paper" if CHAT in run.run.recipe.gives else "harness"
        conditions += [f"protocol {row['protocol']}"] if row["protocol"] not in (None, protocol) else []
    conditions += [f"split {row['split']}"] if row["split"] not in (None, *usual) else []
    conditions += [row["conditions"]] if row["conditions"] else []
    return name + (f" [{', '.join(conditions)}]" if conditions else "")


def grids_of(collection: Collection, rows: Sequence[str] = (HEADS,)) -> list[Grid]:
    """Group the runs; of two runs with the same recipe and seed, the newer one counts."""
    check_rows(rows, [run.values for run in collection.runs])
    left_out = {*rows, OPERATORS} if HEADS in rows else set(rows)  # rows by heads are also rows by operator
    grids: dict[str, Grid] = {}
    # A run stopped before it read its data is a gap in its recipe's grid, not a separate grid.
    for run in sorted(collection.runs, key=lambda run: DATA not in run.identity):
        identity = {key: value for key, value in run.identity.items() if key not in left_out}
        alike = [grid for grid in grids.values() if {**grid.identity, DATA: ""} == {**identity, DATA: ""}]
        if DATA not in identity and len(alike) == 1:
            identity = alike[0].identity
        grid = grids.setdefault(json.dumps(identity, sort_keys=True), Grid(identity, tuple(rows)))
        row = grid.rows.setdefault(RowKey.of(run, rows), {})
        other = row.get(run.seed)
        if other is not None:
            older, run = sorted((other, run), key=lambda each: (each.run.is_finished, time_of(each.run.info)))
            collection.notes.append(f"{older.run.path} is left out: {run.run.path} has the same recipe and seed")
        row[run.seed] = run
    for grid in grids.values():
        grid.rows = {key: dict(sorted(grid.rows[key].items(), key=_seed_order)) for key in sorted(grid.rows)}
        labels = {run.name: key.label for key, runs in grid.rows.items() for run in runs.values()}
        own = collection.frame[collection.frame["run"].isin(labels)]
        grid.frame = _of_one_data(own.assign(row=own["run"].map(labels)), grid.runs, collection.notes)
    _name(list(grids.values()))
    collection.notes += _differences_in_words(list(grids.values()))
    return list(grids.values())


def _seed_order(item: tuple[str, Any]) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in item[0].split("+"))


def _of_one_data(frame: "DataFrame", runs: Sequence[ReportRun], notes: list[str]) -> "DataFrame":
    """Keep each measure's numbers on the data of its latest measurement."""
    if frame.empty:
        return frame
    own = {
        run.name: {run.run.info.get("data"), run.run.info.get("data_sha256"), run.whole.first.get("data_sha256")}
        for run in runs
    }
    rows = frame[["run", "data", "data_sha256", "measure"]].to_dict("records")
    data = ["its own" if {row["data"], row["data_sha256"]} & own[row["run"]] else row["data_sha256"] for row in rows]
    last = {row["measure"]: each for row, each in zip(rows, data, strict=True)}
    kept = [each == last[row["measure"]] for row, each in zip(rows, data, strict=True)]
    for row in (row for row, is_kept in zip(rows, kept, strict=True) if not is_kept):
        notes.append(f"{row['run']}: {row['measure']} was measured on other data than the rest and is left out")
    return frame[kept]


def check_rows(rows: Sequence[str], recipes: Sequence[dict[str, Any]]) -> None:
    known = {key for recipe in recipes for key in recipe}
    for key in rows:
        if key == "seed":
            raise UsageError("--rows: tables average over seeds, so seeds cannot be rows; name another key")
        if recipes and key not in known:
            close = get_close_matches(key, sorted(known), 1)
            hint = f"; did you mean {close[0]}?" if close else "; give a key of recipe.yaml, such as optimizer.lr"
            raise UsageError(f"--rows: no recipe of these runs has a key {key[:60]!r}{hint}")


_KINDS = {"classification": "image classification", "self_supervised": "self-supervised images"}
_STAGES = {"midtrain": "chat mid-training", "sft": "chat fine-tuning"}


def kind_in_words(run: ReportRun) -> str:
    return _STAGES.get(str(run.values.get("stage"))) or _KINDS.get(run.objective, run.objective.replace("_", " "))


def data_in_words(run: ReportRun) -> str:
    if mixture := run.values.get("mixture"):
        names = list(dict.fromkeys(str(part["name"]).replace("_", " ") for part in mixture))
        return ", ".join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])])
    return run.data_set or str(run.values.get("data.train") or run.run.info.get("data") or "")


def differing(grids: Sequence[Grid]) -> dict[str, list[str]]:
    """Return the keys in which the grids differ, with each grid's value."""
    keys = dict.fromkeys(key for grid in grids for key in grid.identity)
    values = {key: [in_words(grid.identity.get(key)) for grid in grids] for key in keys}
    return {key: per_grid for key, per_grid in values.items() if len(set(per_grid)) > 1}


def _alike(grids: Sequence[Grid]) -> list[list[Grid]]:
    """Group the grids by kind of training and data."""
    alike: dict[tuple[str, str], list[Grid]] = {}
    for grid in grids:
        alike.setdefault((kind_in_words(grid.first), data_in_words(grid.first)), []).append(grid)
    return list(alike.values())


def _name(grids: Sequence[Grid]) -> None:
    """Title each grid by its objective, its data and the distinguishing keys: no two grids share a title."""
    for alike in _alike(grids):
        different = differing(alike)
        for place, grid in enumerate(alike):
            words = ", ".join(f"{key} {values[place]}" for key, values in different.items())
            parts = (kind_in_words(grid.first), data_in_words(grid.first), words)
            grid.title = " · ".join(part for part in parts if part)


def _differences_in_words(grids: Sequence[Grid]) -> list[str]:
    """Explain why runs of one kind on the same data are split into several tables."""
    lines = []
    for alike in _alike(grids):
        different = differing(alike)
        if different:
            shown = [f"{key}: {', '.join(dict.fromkeys(values))}" for key, values in different.items()]
            more = f"; and {len(shown) - 12} more" if len(shown) > 12 else ""
            lines.append(
                f"{sum(len(grid.runs) for grid in alike)} runs of {alike[0].first.objective} are in {len(alike)} "
                f"tables, not averaged together, because they differ in {'; '.join(shown[:12])}{more}"
            )
    return lines


def in_words(value: str | None) -> str:
    """Shorten a value of an identity; different values never look the same."""
    if value is None:
        return "none"
    text = json.loads(value)
    text = text if isinstance(text, str) and text.isprintable() and text not in ("", "none", "null") else value
    return text if len(text) <= 40 else f"{text[:30]}...{sha256(text.encode()).hexdigest()[:6]}"
