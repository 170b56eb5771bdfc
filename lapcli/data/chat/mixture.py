"""A mixture: rows of several data sets in an order that is a function of (seed, epoch).

Each data set from files is shuffled and its first `rows` are taken; then the rows of all data sets, each repeated
`repeats` times, are shuffled together. With the seed 42 both shuffles are nanochat's. The rows of a recipe's mixtures
can be counted before anything is rendered or downloaded.

cache/chat/KEY are the parts of a token store, by one source file, the tokenizer and the longest row. The numbers of a
row are its length, its number of targets, and whether it was truncated.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.chat.conversation import EXPECTED_FORMS, READERS, Malformed, Turn, render_batch
from lapcli.data.chat.generated import GENERATED_FORMATS, builtin_questions, generated_conversations, generated_key
from lapcli.data.files import build_once, count_rows, digest, read_rows
from lapcli.data.sources import source_files
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.data.token_store import PartWriter, TokenStore, file_key, has_index
from lapcli.recipe.chat import GENERATED, ChatRecipe, ChatStageRecipe, DataSet, Stage
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress
from lapcli.runtime.tables import aligned

VERSION = 6  # of the files and of the wording of generated rows
OWN_HELD_OUT = 0.05  # fraction of one's own conversations
_ROWS_AT_ONCE = 2048


def prepare_rows(data_set: DataSet, tokenizer: Tokenizer, longest: int, progress: Progress | None = None) -> TokenStore:
    """Download and render the rows unless they are cached. Safe to call on every rank."""
    if data_set.format in GENERATED_FORMATS:
        sources: list[tuple[Any, Iterable[list[Turn]]]] = [(generated_key(data_set), generated_conversations(data_set))]
    else:
        paths = source_files(*data_set.place, "chat") or []
        sources = [(file_key(path), read_conversations(path, data_set.format)) for path in paths]
    folders = []
    for number, (key, conversations) in enumerate(sources, start=1):
        folder = cache_dir() / "chat" / digest(VERSION, data_set.format, key, tokenizer.sha256, longest)[:32]
        folders.append(build_once(folder, partial(_render, conversations, tokenizer, longest), has_index))
        if progress:
            progress(f"rendering {data_set.name}", number, len(sources))
    rows = TokenStore(folders)
    if not len(rows):
        raise DataError(f"{data_set.name} has no rows; check its source")
    return rows


def read_conversations(path: Path, form: str) -> Iterator[list[Turn]]:
    """Yield every row of a file as a conversation; raise DataError at the first invalid row."""
    for number, row in enumerate(read_rows(path), start=1):
        try:
            turns = READERS[form](row)
            if not all("".join(part.text for part in turn.parts).strip() for turn in turns):
                raise Malformed("a turn is empty")  # which would only teach the model to be silent
        except Malformed as error:
            expected = f"; expected {EXPECTED_FORMS}" if form == "conversations" and number == 1 else ""
            raise DataError(f"{path}, row {number}: {error}; correct or remove it{expected}") from None
        yield turns


def _render(conversations: Iterable[list[Turn]], tokenizer: Tokenizer, longest: int, folder: Path) -> None:
    writer = PartWriter(folder, tokenizer.vocab_size, columns=3, has_targets=True)
    conversations = iter(conversations)
    while some := list(islice(conversations, _ROWS_AT_ONCE)):
        for ids, is_target in render_batch(some, tokenizer):
            writer.append(ids[:longest], is_target[:longest])
            writer.end(is_target[:longest].sum(), len(ids) > longest)
    writer.close()


@dataclass(frozen=True)
class MixtureShare:
    """One data set's part of a mixture."""

    data_set: DataSet
    rows: TokenStore
    chosen: np.ndarray  # numbers of its rows, without repeats


class Mixture:
    """A shuffled mixture of rows; with `needs_targets`, rows without targets are dropped and counted."""

    def __init__(self, parts: Sequence[MixtureShare], seed: int, needs_targets: bool) -> None:
        self.parts, self._seed = parts, seed
        # Indexed by a row's number in the mixture: the part and the row in it.
        self._row_of = np.concatenate([np.tile(part.chosen, part.data_set.repeats) for part in parts])
        self._part_of = np.repeat(np.arange(len(parts)), [len(p.chosen) * p.data_set.repeats for p in parts])
        self.lengths = self._gather([part.rows.lengths for part in parts])
        self.target_counts = self._gather([part.rows.numbers[:, 1] for part in parts])
        is_usable = (self.target_counts > 0) if needs_targets else (self.lengths > 1)
        self._usable = np.flatnonzero(is_usable)
        # Rows truncated at the context.
        self.cut = int(self._gather([part.rows.numbers[:, 2] for part in parts])[self._usable].sum())
        self.rows_asked_for = len(is_usable)
        self.dropped = self.rows_asked_for - len(self._usable)
        if len(self._usable) == 0:
            raise DataError("no row of the mixture has a training target; check the data sets, or use loss: all")
        # Two epochs, because a batch may span the boundary between them.
        self.order = lru_cache(maxsize=2)(self._compute_order)

    def __len__(self) -> int:
        """Return the number of rows per epoch."""
        return len(self._usable)

    @property
    def identity(self) -> str:
        shares = [(part.rows.identity, len(part.chosen), part.data_set.repeats) for part in self.parts]
        return digest(self._seed, shares)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and target flags of a row, by its number in `order`."""
        return self.parts[self._part_of[number]].rows.row(int(self._row_of[number]))

    def name(self, number: int) -> str:
        """Return the row's name for messages."""
        return f"row {self._row_of[number]:,} of {self.parts[self._part_of[number]].data_set.name}"

    def describe(self) -> str:
        parts = [
            f"{part.data_set.name} {'' if part.data_set.repeats == 1 else f'{part.data_set.repeats} x '}"
            f"{len(part.chosen):,}"
            for part in self.parts
        ]
        text = f"{' + '.join(parts)} = {self.rows_asked_for:,} rows"
        text += f"; {self.dropped:,} without a token to learn are left out" if self.dropped else ""
        return text + (f"; {self.cut:,} ({self.cut / len(self):.1%}) are cut at the context" if self.cut else "")

    def _compute_order(self, epoch: int) -> np.ndarray:
        numbers = list(range(self.rows_asked_for))
        # Epoch 0 is nanochat's shuffle (tasks/common.py); later epochs have another order, seeded by a string.
        random.Random(self._seed if epoch == 0 else f"{self._seed} epoch {epoch}").shuffle(numbers)
        order = np.array(numbers)
        # Dropped after the shuffle, so that the order of the other rows is the same with and without the dropped ones.
        return order if self.dropped == 0 else order[np.isin(order, self._usable)]

    def _gather(self, of_parts: Sequence[np.ndarray]) -> np.ndarray:
        """Combine per-row values of the data sets into values per row of the mixture."""
        shares = zip(self.parts, of_parts, strict=True)
        return np.concatenate([np.tile(values[part.chosen], part.data_set.repeats) for part, values in shares])


def data_sets_of(stage: Stage | ChatStageRecipe) -> tuple[list[DataSet], list[DataSet]]:
    """Return a stage's training data sets and validation data sets."""
    own_fraction = 0.0 if any(data_set.is_own for data_set in stage.validation.mixture) else OWN_HELD_OUT
    train, held_out = [], []
    for data_set in stage.mixture:
        fraction = data_set.held_out if data_set.held_out is not None else own_fraction * data_set.is_own
        train.append(data_set.model_copy(update={"held_out": fraction}))
        if fraction:
            held_out.append(train[-1].model_copy(update={"split": "test", "rows": None, "repeats": 1}))
    return train, [*stage.validation.mixture, *held_out]


def prepare_mixture(
    data_sets: Sequence[DataSet],
    tokenizer: Tokenizer,
    *,
    seed: int,
    longest: int,
    needs_targets: bool,
    progress: Progress | None = None,
) -> Mixture:
    parts = []
    for data_set in data_sets:
        rows = prepare_rows(data_set, tokenizer, longest, progress)
        parts.append(MixtureShare(data_set, rows, chosen_rows(data_set, len(rows), seed)))
    return Mixture(parts, seed, needs_targets)


def chosen_rows(data_set: DataSet, available: int, seed: int) -> np.ndarray:
    """Return the numbers of the rows to use; generated rows are already random, so they are not shuffled."""
    left = split_rows(data_set, available)
    wanted = data_set.rows or left
    if wanted > left:
        but = f" besides the {available - left:,} that are held out" if left < available else ""
        raise DataError(f"{data_set.name} has {left:,} rows{but}, but the recipe asks for {wanted:,}; lower its `rows`")
    if left == 0 and data_set.held_out:
        raise DataError(f"{data_set.name} has too few rows to hold some out; add conversations, or set `held_out: 0`")
    if data_set.format in GENERATED:
        return np.arange(wanted)
    # The permutation of `datasets`' shuffle(seed), which nanochat's tasks call first; its end is held out.
    order = np.random.default_rng(seed).permutation(available)
    return order[-left:] if data_set.held_out and data_set.split == "test" else order[:wanted]


def split_rows(data_set: DataSet, available: int) -> int:
    """Return the number of rows in the data set's split."""
    held_out = min(available, max(1, round(data_set.held_out * available))) if data_set.held_out else 0
    return held_out if data_set.held_out and data_set.split == "test" else available - held_out


def available_rows(data_set: DataSet) -> int | None:
    """Count the rows of the source; None if that needs a download. The recipe sets the number of generated rows."""
    if data_set.format in GENERATED:
        return data_set.rows
    if data_set.format == "questions":
        return sum(1 for _ in builtin_questions())
    files = source_files(*data_set.place, "chat", download=False)
    return None if files is None else sum(map(count_rows, files))


def count_stage(stage: Stage | ChatStageRecipe) -> dict[str, Any]:
    """Count the rows of a stage's data sets, null where a download is needed."""
    train, validation = (
        [
            {"name": d.name, "rows": rows, "repeats": d.repeats}
            for d in data_sets
            for available in [available_rows(d)]
            for rows in [d.rows or (None if available is None else split_rows(d, available))]
        ]
        for data_sets in data_sets_of(stage)
    )
    padded, steps, rows = stage.batching == "padded", stage.train.steps, _sum(train)
    if steps is None and padded and rows is not None:
        steps = max(1, int((stage.train.epochs or 0) * rows) // stage.train.batch - stage.drop_last_update)
    return {
        "train": train,
        "validation": validation,
        "batch": stage.train.batch,
        "unit": "conversations" if padded else "packed sequences",
        "steps": steps,  # null for packed stages, whose steps are known once the rows are rendered
        "rows": rows,
        "validation_rows": _sum(validation),
    }


def counts_as_text(name: str, counts: dict[str, Any]) -> str:
    steps = "by tokens, known once rendered" if counts["steps"] is None else f"{counts['steps']:,}"
    rows = []
    for part, before in (("train", "  "), ("validation", "  held out: ")):
        for count in counts[part]:
            shown = "all" if count["rows"] is None else f"{count['rows']:,}"
            rows.append((before + count["name"], shown if count["repeats"] == 1 else f"{count['repeats']} x {shown}"))
    rows.append(("  rows to train on", "unknown" if counts["rows"] is None else f"{counts['rows']:,}"))
    return "\n".join([f"{name}: {counts['batch']:,} {counts['unit']} a step, steps: {steps}", *aligned(rows, {1})])


def _sum(counts: Sequence[dict[str, Any]]) -> int | None:
    known = all(count["rows"] is not None for count in counts)
    return sum(count["rows"] * count["repeats"] for count in counts) if known else None


def fetch_data_sets(recipe: ChatRecipe) -> list[dict[str, Any]]:
    """Download the missing data of the mixtures; return an entry per data set."""
    entries: dict[str, dict[str, Any]] = {}
    for stage in recipe.stages.given().values():
        for data_set in (*stage.mixture, *stage.validation.mixture):
            files = [] if data_set.source == "builtin" else source_files(*data_set.place, "chat") or []
            entries[f"{data_set.format}, {data_set.source}, {data_set.files}"] = {
                "name": data_set.name,
                "source": data_set.source,
                "rows": available_rows(data_set),
                "bytes": sum(path.stat().st_size for path in files),
            }
    return list(entries.values())


def with_local_data(recipe: ChatRecipe, folder: Path) -> ChatRecipe:
    """Return the recipe with the copies of its data sets in `folder` as sources.

    A copy of hub:OWNER/NAME is the folder NAME with the hub's files; a copy of an https file keeps its file name. Data
    sets without a copy keep their source.
    """

    def local(data_set: DataSet) -> DataSet:
        copy = folder / data_set.source.rpartition("/")[2]
        if not data_set.source.startswith(("hub:", "https://")) or not copy.exists():
            return data_set
        changes = {"source": str(copy), "revision": None, "held_out": data_set.held_out or 0.0}
        return data_set.model_copy(update=changes)

    def stage(before: Stage) -> Stage:
        validation = before.validation.model_copy(update={"mixture": [local(d) for d in before.validation.mixture]})
        return before.model_copy(update={"mixture": [local(d) for d in before.mixture], "validation": validation})

    if not folder.is_dir():
        raise DataError(f"--data {folder} is not a folder; give one that holds copies of the data sets, by their names")
    stages: dict[str, Stage] = {str(name): stage(before) for name, before in recipe.stages.given().items()}
    return recipe.model_copy(update={"stages": recipe.stages.model_copy(update=stages)})
