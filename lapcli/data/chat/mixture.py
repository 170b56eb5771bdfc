"""A mixture: rows of several data sets in an order that is a function of (seed, epoch).

Each data set from files is shuffled and its first `rows` are taken; then the rows of all data sets, each repeated
`repeats` times, are shuffled together. With the seed 42 both shuffles are nanochat's. The rows of a recipe's mixtures
can be counted before anything is rendered or downloaded.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lapcli.data.cache import digest
from lapcli.data.chat.formats import EXPECTED_FORMS, source_files
from lapcli.data.chat.rendered_rows import RenderedRows, prepare_rows, rows_at_hand
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.recipe.chat import GENERATED, ChatRecipe, ChatStageRecipe, DataSet, Stage
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file
from lapcli.runtime.progress import Progress


@dataclass(frozen=True)
class MixtureShare:
    """One data set's share of a mixture."""

    data_set: DataSet
    rows: RenderedRows
    chosen: np.ndarray  # numbers of its rows, without repeats


class Mixture:
    """A shuffled mixture of rows; with `needs_targets`, rows without a token to learn are dropped and counted."""

    def __init__(self, parts: Sequence[MixtureShare], seed: int, needs_targets: bool) -> None:
        self.parts, self._seed = parts, seed
        # By a row's number in the mixture: the share and the row in it.
        self._row_of = np.concatenate([np.tile(part.chosen, part.data_set.repeats) for part in parts])
        self._part_of = np.repeat(np.arange(len(parts)), [len(p.chosen) * p.data_set.repeats for p in parts])
        self.lengths = self._gather([part.rows.lengths for part in parts])
        self.target_counts = self._gather([part.rows.target_counts for part in parts])
        is_usable = (self.target_counts > 0) if needs_targets else (self.lengths > 1)
        self._usable = np.flatnonzero(is_usable)
        # Rows that are truncated at the context.
        self.cut = int(self._gather([part.rows.is_cut for part in parts])[self._usable].sum())
        self.rows_asked_for = len(is_usable)
        self.dropped = self.rows_asked_for - len(self._usable)
        if len(self._usable) == 0:
            raise DataError("no row of the mixture has a token to learn; check the data sets, or use loss: all")
        # Two epochs, because a batch may end one and begin the next.
        self.order = lru_cache(maxsize=2)(self._compute_order)

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return len(self._usable)

    @property
    def identity(self) -> str:
        shares = [(part.rows.identity, len(part.chosen), part.data_set.repeats) for part in self.parts]
        return digest(self._seed, shares)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and marks of a row, by its number in `order`."""
        return self.parts[self._part_of[number]].rows.row(int(self._row_of[number]))

    def name(self, number: int) -> str:
        """Return the name of a row in messages."""
        return f"row {self._row_of[number]:,} of {self.parts[self._part_of[number]].data_set.name}"

    def describe(self) -> str:
        parts = [
            f"{part.data_set.name} {'' if part.data_set.repeats == 1 else f'{part.data_set.repeats} x '}"
            f"{len(part.chosen):,}"
            for part in self.parts
        ]
        malformed, longest = sum(part.rows.malformed for part in self.parts), self.parts[0].rows.longest
        text = f"{' + '.join(parts)} = {self.rows_asked_for:,} rows"
        text += f"; {self.dropped:,} without a token to learn are left out" if self.dropped else ""
        text += f"; {malformed:,} malformed ones are left out" if malformed else ""
        return text + (f"; {self.cut:,} ({self.cut / len(self):.1%}) are cut at {longest:,} tokens" if self.cut else "")

    def malformed_examples(self) -> list[str]:
        """Return messages about the first malformed rows that were skipped."""
        return [f"left out: {example}" for part in self.parts for example in part.rows.examples_of_malformed]

    def _compute_order(self, epoch: int) -> np.ndarray:
        numbers = list(range(self.rows_asked_for))
        # Epoch 0 is nanochat's shuffle (tasks/common.py); a later epoch has another order, with a text as its seed.
        random.Random(self._seed if epoch == 0 else f"{self._seed} epoch {epoch}").shuffle(numbers)
        order = np.array(numbers)
        # Dropped after the shuffle, so that the order of the other rows is the same with and without the dropped ones.
        return order if self.dropped == 0 else order[np.isin(order, self._usable)]

    def _gather(self, of_parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of all rows of the mixture, from those of all rows of each data set."""
        shares = zip(self.parts, of_parts, strict=True)
        return np.concatenate([np.tile(values[part.chosen], part.data_set.repeats) for part, values in shares])


def prepare_mixture(
    data_sets: Sequence[DataSet],
    tokenizer: Tokenizer,
    *,
    seed: int,
    longest: int,
    needs_targets: bool,
    skip_malformed: bool,
    progress: Progress | None = None,
) -> Mixture:
    parts = []
    for data_set in data_sets:
        rows = prepare_rows(data_set, tokenizer, longest, progress)
        if rows.malformed and not skip_malformed:
            raise _malformed(data_set, rows)
        parts.append(MixtureShare(data_set, rows, chosen_rows(data_set, len(rows), seed)))
    return Mixture(parts, seed, needs_targets)


def chosen_rows(data_set: DataSet, available: int, seed: int) -> np.ndarray:
    """Return the numbers of the rows to use; generated rows are random already and are not shuffled."""
    wanted = data_set.rows or available
    if wanted > available:
        raise DataError(f"{data_set.name} has {available:,} rows, but the recipe asks for {wanted:,}; lower its `rows`")
    if data_set.format in GENERATED:
        return np.arange(wanted)
    # The permutation of `datasets`' shuffle(seed), which nanochat's tasks call first.
    return np.random.default_rng(seed).permutation(available)[:wanted]


def _malformed(data_set: DataSet, rows: RenderedRows) -> DataError:
    examples = "".join(f"\n  {example}" for example in rows.examples_of_malformed)
    more = rows.malformed - len(rows.examples_of_malformed)
    rest = f"\n  and {more:,} more" if more else ""
    advice = "Correct them, or set skip_malformed: true in the stage to leave them out."
    if data_set.format == "conversations" and len(rows) == 0:  # skipping them would leave nothing
        advice = f"Expected {EXPECTED_FORMS}."
    return DataError(
        f"{rows.malformed:,} of {rows.malformed + len(rows):,} conversations of {data_set.name} are malformed:"
        f"{examples}{rest}\n{advice}"
    )


@dataclass(frozen=True)
class DataSetCount:
    name: str
    rows: int | None  # used; None: all of a source that is not on this machine
    repeats: int
    available: int | None  # in the source; None: not on this machine


@dataclass(frozen=True)
class StageCounts:
    stage: str
    train: list[DataSetCount]
    validation: list[DataSetCount]
    batch: int
    unit: str
    steps: int | None  # None for packed stages, whose steps are known once the rows are rendered
    learning_rate_scale: float

    @property
    def rows(self) -> int | None:
        return _sum(self.train)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": self.rows, "validation_rows": _sum(self.validation)}

    def to_text(self) -> str:
        steps = "by tokens, known once rendered" if self.steps is None else f"{self.steps:,}"
        lines = [f"{self.stage}: {self.batch:,} {self.unit} a step, steps: {steps}", *_table(self.train)]
        return "\n".join(lines + (["  held out", *_table(self.validation)] if self.validation else []))


def count_stages(recipe: ChatRecipe) -> list[StageCounts]:
    return [count_stage(name, stage) for name, stage in recipe.stages.given().items()]


def count_stage(name: str, stage: Stage | ChatStageRecipe) -> StageCounts:
    train, validation = (
        [
            DataSetCount(data_set.name, data_set.rows or available, data_set.repeats, available)
            for data_set in data_sets
            for available in [rows_at_hand(data_set)]
        ]
        for data_sets in (stage.mixture, stage.validation.mixture)
    )
    padded, steps, rows = stage.batching == "padded", stage.train.steps, _sum(train)
    if steps is None and padded and rows is not None:
        steps = max(1, int((stage.train.epochs or 0) * rows) // stage.train.batch - stage.drop_last_update)
    unit = "conversations" if padded else "packed sequences"
    return StageCounts(name, train, validation, stage.train.batch, unit, steps, stage.optimizer.lr_scale)


def _sum(counts: Sequence[DataSetCount]) -> int | None:
    if any(count.rows is None for count in counts):
        return None
    return sum((count.rows or 0) * count.repeats for count in counts)


def _table(counts: Sequence[DataSetCount]) -> list[str]:
    lines = []
    for count in counts:
        rows = "all" if count.rows is None else f"{count.rows:,}"
        rows = rows if count.repeats == 1 else f"{count.repeats} x {rows}"
        there = "not on this machine" if count.available is None else f"of {count.available:,}"
        lines.append(f"  {count.name:<24}{rows:>14}   {there}")
    total = _sum(counts)
    return [*lines, f"  {'rows in all':<24}{'unknown' if total is None else f'{total:,}':>14}"]


def fetch_data_sets(recipe: ChatRecipe, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Download the missing data of the mixtures; return an entry per data set."""
    entries: dict[tuple, dict[str, Any]] = {}
    for stage in recipe.stages.given().values():
        for data_set in (*stage.mixture, *stage.validation.mixture):
            files = [] if data_set.source in ("builtin", "system") else source_files(data_set, progress) or []
            key = (data_set.format, data_set.source, str(data_set.files), data_set.revision)
            entries[key] = {
                "name": data_set.name,
                "source": data_set.source,
                "rows": max(rows_at_hand(data_set) or 0, entries.get(key, {"rows": 0})["rows"]),
                "bytes": sum(path.stat().st_size for path in files),
                "sha256": [sha256_of_file(path) for path in files],
            }
    return list(entries.values())
