"""Groups the runs that are averaged: their recipes and data agree in everything but the seed and the keys of the rows.

Runs that agree but for rows and seeds are one grid, and get one table. A run that differs in any other key belongs to
another grid, and the differing keys are printed: runs that were trained differently are never averaged.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lapcli.heads.plan import head_plan, operator_plan
from lapcli.recipe import OBJECTIVES, canonical_json
from lapcli.report.collect import Number, RunResult
from lapcli.runs import FREE_KEYS, time_of
from lapcli.runtime.errors import UsageError

HEADS, OPERATORS = "model.laplacian_heads", "model.operators"
DATA = "(data sha256)"  # a key of the grid beside the recipe's


@dataclass(frozen=True, order=True)
class RowKey:
    """The value of a row; sorts as a number if it is one."""

    order: tuple[float, ...]
    label: str

    @property
    def heads(self) -> int | None:
        """The number of Laplacian heads in every layer, in rows by heads; None if the plan differs by layer."""
        return int(self.label) if self.label.isdecimal() else None

    @classmethod
    def of_heads(cls, number: int) -> "RowKey":
        return cls((float(number),), str(number))


@dataclass
class RunGrid:
    """Runs that agree in all but the keys of the rows and the seeds: the content of one table."""

    identity: dict[str, str]  # every key but the rows' and the seeds, as JSON
    rows: dict[RowKey, dict[str, RunResult]] = field(default_factory=dict)  # by seed
    title: str = ""
    rows_by: tuple[str, ...] = (HEADS,)

    @property
    def runs(self) -> list[RunResult]:
        return [run for row in self.rows.values() for run in row.values()]

    @property
    def objective(self) -> str:
        return self.runs[0].objective

    @property
    def all_heads(self) -> int:
        """The number of heads in a layer, Laplacian or not."""
        return int(self.runs[0].recipe["model"]["heads"])

    @property
    def seeds(self) -> list[str]:
        return sorted({seed for row in self.rows.values() for seed in row}, key=_seed_order)

    @property
    def baseline(self) -> RowKey | None:
        """The row without Laplacian heads; None if the rows are not by heads, or if several rows have none."""
        if HEADS not in self.rows_by:
            return None
        place = self.rows_by.index(HEADS)
        without = [row for row in self.rows if row.order[place] == 0]
        return without[0] if len(without) == 1 else None

    def values(self, row: RowKey, metric: str) -> dict[str, float]:
        """Return the numbers of a row by seed, without runs that lack the number."""
        runs = self.rows[row]
        return {seed: run.numbers[metric].value for seed, run in runs.items() if metric in run.numbers}

    def number(self, metric: str) -> Number | None:
        """Return one of the runs' numbers, for its unit and direction."""
        return next((run.numbers[metric] for run in self.runs if metric in run.numbers), None)

    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.numbers))


def group(runs: Sequence[RunResult], rows: Sequence[str], notes: list[str]) -> list[RunGrid]:
    """Group runs into grids; of two runs with the same recipe and seed, the newer one counts."""
    check_rows(rows, [run.recipe for run in runs])
    grids: dict[str, RunGrid] = {}
    # A run that was stopped before it had read its data is a gap in the grid of its recipe, not a grid of its own.
    for run in sorted(runs, key=lambda run: DATA not in identity_of(run)):
        identity = _with_data(identity_of(run, rows), grids.values())
        grid = grids.setdefault(json.dumps(identity, sort_keys=True), RunGrid(identity, rows_by=tuple(rows)))
        row = grid.rows.setdefault(row_key(run, rows), {})
        other = row.get(run.seed)
        if other is not None:
            newer, older = _newer(run, other)
            left, used = (older.path, newer.path) if older.name == newer.name else (older.name, newer.name)
            notes.append(f"{left} is left out: it has the same recipe and seed as {used}, which is used")
            run = newer
        row[run.seed] = run
    for grid in grids.values():
        grid.rows = {
            key: dict(sorted(row.items(), key=lambda item: _seed_order(item[0])))
            for key, row in sorted(grid.rows.items())
        }
    _name(list(grids.values()))
    return list(grids.values())


def row_keys(paper: str | None, format_: str, rows: str, columns: str | None, baseline: str | None) -> list[str]:
    """Return the keys of the rows of `lap report`; UsageError for options that cannot be combined."""
    if paper is not None and (columns or baseline or rows != HEADS):
        raise UsageError("--paper has the paper's rows and columns; leave out --rows, --columns and --baseline")
    if paper is not None and format_ == "html":
        raise UsageError("the html page has all three of the paper's tables; leave out --paper")
    if paper is not None and format_ in ("svg", "png", "pdf"):
        raise UsageError(f"--paper is a table and --format {format_} writes figures; leave out one of them")
    return names_in("--rows", rows)


def names_in(option: str, text: str) -> list[str]:
    """Split a comma-separated list of names; return each once."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(names):
        raise UsageError(f"{option} takes names with commas between them, got {text[:60]!r}")
    return names


def check_rows(rows: Sequence[str], recipes: Sequence[Mapping[str, Any]]) -> None:
    known = {key for recipe in recipes for key, _ in flatten(recipe)}
    for key in rows:
        if key == "seed":
            raise UsageError("--rows: tables are over seeds, so seeds cannot be their rows; name another key")
        if recipes and key not in known:
            close = get_close_matches(key, sorted(known), 1)
            hint = f"; did you mean {close[0]}?" if close else "; give a key of recipe.yaml, such as optimizer.lr"
            raise UsageError(f"--rows: no recipe of these runs has a key {key[:60]!r}{hint}")


def identity_of(run: RunResult, rows: Sequence[str] = (HEADS,)) -> dict[str, str]:
    """Return every key that has to agree, without the model of the stages before a chat run, which is the same."""
    if run.identity is None:
        run.identity = {}
        # Whether the micro-batch is part of the result, as `micro_batch_counts` of a recipe.
        counts = run.objective == "self_supervised" or run.recipe.get("average") == "micro_batch"
        for key, value in flatten(run.recipe):
            plain_key = re.sub(r"^(start\.)+", "", key)
            # A stage inherits them. Kept, start.model.laplacian_heads would make a grid of every number of heads.
            if plain_key != key and plain_key.startswith(("model.", "tokenizer.")):
                continue
            if FREE_KEYS.fullmatch(plain_key) and not (plain_key == "train.micro_batch" and counts):
                continue
            run.identity[key] = canonical_json(key, value)
        # Where the seed is part of the data's identity, as in chat mixtures, seeds could never be averaged.
        if not OBJECTIVES[run.objective].data_identity_has_seed and run.info.get("data_sha256"):
            run.identity[DATA] = json.dumps(str(run.info["data_sha256"])[:16])
        if run.is_search:
            run.identity["(search)"] = "true"
    left_out = {*rows, OPERATORS} if HEADS in rows else set(rows)  # rows by heads are also rows by operator
    return {key: value for key, value in run.identity.items() if key not in left_out}


def _with_data(identity: dict[str, str], grids: Iterable[RunGrid]) -> dict[str, str]:
    """Return, for a run whose data is not known yet, the identity of the only grid that agrees in all else."""
    if DATA in identity:
        return identity
    same = [grid.identity for grid in grids if {**grid.identity, DATA: ""} == {**identity, DATA: ""}]
    return same[0] if len(same) == 1 else identity


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves with their dotted keys; `laplacian_heads`, `operators` and lists are leaves."""
    for name, inner in value.items():
        key = f"{prefix}{name}"
        # `endswith`, because in the recipe of a chat stage the key is start.model.laplacian_heads.
        if isinstance(inner, Mapping) and not key.endswith((HEADS, OPERATORS)):
            yield from flatten(inner, f"{key}.")
        else:
            yield key, inner


def row_key(run: RunResult, rows: Sequence[str]) -> RowKey:
    leaves = dict(flatten(run.recipe))
    orders: list[float] = []
    labels = []
    for key in rows:
        value = leaves.get(key)
        if key == HEADS and value is not None:
            order, label = _heads(run, value)
        elif isinstance(value, int | float):
            order, label = float(value), f"{value:g}" if isinstance(value, float) else str(value)
        else:
            order, label = float("inf"), value if isinstance(value, str) else json.dumps(value)
        orders.append(order)
        labels.append(label)
    return RowKey(tuple(orders), ", ".join(labels))


def _heads(run: RunResult, value: Any) -> tuple[float, str]:
    """Return order and label of a head plan, equal for `3` and `[3, 3, 3, 3]`.

    The order is the mean number of heads in a layer; plans with other operators come after all others.
    """
    model = run.recipe["model"]
    if model.get("operators") is not None:
        plan = operator_plan(model["operators"], model["layers"], model["heads"])
    else:
        plan = head_plan(value, model["layers"], model["heads"])
    mean = sum(plan.counts().values()) / len(plan.per_layer)
    # Above the number of heads, which is how `figures` recognises rows of other operators.
    return mean + (0 if plan.is_laplacian else plan.heads), plan.label()


def differences(grids: Sequence[RunGrid]) -> dict[str, list[str | None]]:
    """Return the keys in which the grids differ, with each grid's value."""
    keys = list(dict.fromkeys(key for grid in grids for key in grid.identity))
    values = {key: [grid.identity.get(key) for grid in grids] for key in keys}
    return {key: per_grid for key, per_grid in values.items() if len(set(per_grid)) > 1}


def same_training(grids: Sequence[RunGrid]) -> list[list[RunGrid]]:
    """Collect grids of the same kind of training on the same data, which one would expect in one table."""
    by_training: dict[tuple[str, str], list[RunGrid]] = {}
    for grid in grids:
        by_training.setdefault(_training_and_data(grid), []).append(grid)
    return list(by_training.values())


def _training_and_data(grid: RunGrid) -> tuple[str, str]:
    run = grid.runs[0]
    stage = f", {run.recipe['stage']}" if run.recipe.get("stage") else ""
    data = (run.recipe.get("data") or {}).get("train") or run.info.get("data") or ""
    search = ", search" if run.is_search else ""
    return run.objective.replace("_", " ") + stage + search, str(data)


def _name(grids: Sequence[RunGrid]) -> None:
    """Title each grid by its objective, its data and the keys that tell it apart: no two grids share a title."""
    for alike in same_training(grids):
        for grid, words in zip(alike, distinguishing_words(alike), strict=True):
            grid.title = " · ".join(
                part for part in (kind_in_words(grid.runs[0]), data_in_words(grid.runs[0]), words) if part
            )


_KINDS = {"classification": "image classification", "self_supervised": "self-supervised images"}
_STAGES = {"midtrain": "chat mid-training", "sft": "chat fine-tuning"}
_MOST_NAMES = 4


def kind_in_words(run: RunResult) -> str:
    kind = _STAGES.get(str(run.recipe.get("stage"))) or _KINDS.get(run.objective, run.objective.replace("_", " "))
    return kind + (", search" if run.is_search else "")


def names_in_words(names: Sequence[str]) -> str:
    """Return `a, b and c`, or the first names and how many more there are."""
    shown = list(names[:_MOST_NAMES])
    if len(names) > len(shown):
        shown.append(f"{len(names) - len(shown)} more")
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


def data_in_words(run: RunResult) -> str:
    if mixture := run.recipe.get("mixture"):
        return names_in_words(list(dict.fromkeys(str(part["name"]).replace("_", " ") for part in mixture)))
    data = str((run.recipe.get("data") or {}).get("train") or run.info.get("data") or "")
    name, _, part = data.partition(":")
    if name != "builtin":
        return data
    return f"built-in {part or {'classification': 'digits', 'language_model': 'text'}.get(run.objective, 'data')}"


def distinguishing_words(grids: Sequence[RunGrid], left_out: Sequence[str] = (), most: int = 3) -> list[str]:
    """Return for each grid the values that differ: the data if it does, the first keys, and as many more as are needed
    to tell all grids apart."""
    differing = {key: values for key, values in differences(grids).items() if key not in left_out}
    words = {key: [f"{title_words(key)} {in_words(value)}" for value in differing[key]] for key in differing}
    keys = [key for key in differing if key != DATA]
    shown = [*keys[:most], *([DATA] if DATA in differing else [])]
    for key in keys[most:]:
        texts = [tuple(words[known][number] for known in shown) for number in range(len(grids))]
        if len(set(texts)) == len(grids):
            break
        alike_still = [number for number, text in enumerate(texts) if texts.count(text) > 1]
        if len({words[key][number] for number in alike_still}) > 1:
            shown.append(key)
    more = len(differing) - len(shown)
    rest = f" and {more} more difference{'s' if more > 1 else ''}" if more else ""
    return [", ".join(words[key][number] for key in shown) + rest for number in range(len(grids))]


def key_in_words(key: str) -> str:
    """Return the key as `--set` takes it."""
    return "data sha256" if key == DATA else key


_SECTIONS = ("model", "train", "optimizer", "schedule", "data")  # sections that are left out of titles


def title_words(key: str) -> str:
    """Return the key for people, not for `--set`: `optimizer.lr` is `learning rate`, `validation.every` is `validation
    every`."""
    if key == DATA:
        return "data sha256"
    stages, parts = key.count("start."), [part for part in key.split(".") if part != "start"]
    if len(parts) > 1 and parts[0] in _SECTIONS and key != "data.train":
        del parts[0]
    words = " ".join(parts).replace("_", " ").split()
    named = " ".join("learning rate" if word == "lr" else word for word in words)
    return "the stage before: " * stages + named


def in_words(value: str | None) -> str:
    """Return a value of an identity for people: short, and without the quotes of JSON unless they are needed.

    Two different values never read the same.
    """
    if value is None:
        return "none"
    text = json.loads(value)
    if not isinstance(text, str) or not text.isprintable() or text in ("", "none") or _is_json(text):
        text = value
    return text if len(text) <= 40 else f"{text[:30]}...{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _newer(one: RunResult, other: RunResult) -> tuple[RunResult, RunResult]:
    """Return the newer run, then the other one: a finished run wins, then the one that was written last."""
    key = lambda run: (run.is_finished, time_of(run.info))  # noqa: E731
    return (one, other) if key(one) >= key(other) else (other, one)


def _seed_order(seed: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in seed.split("+"))
