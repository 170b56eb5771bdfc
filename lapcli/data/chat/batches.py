"""Batches of conversations, each a function of (seed, step): packed into one stream, or one padded per row.

Shapes: B rows, T tokens. Ignored targets are -1.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lapcli.data.chat.mixture import Mixture
from lapcli.data.token_store import spans
from lapcli.runtime.errors import DataError


class ChatBatch(NamedTuple):
    tokens_BT: Tensor
    targets_BT: Tensor


class PackedBatches:
    """All conversations of an epoch, concatenated and split into sequences of T tokens and their targets.

    Sequence i covers tokens [i T, i T + T] of the epoch: the last target of one is the first input of the next. A run's
    sequences are numbered consecutively across epochs.
    """

    def __init__(self, mixture: Mixture, context: int, only_marked: bool) -> None:
        self._mixture, self._context, self._only_marked = mixture, context, only_marked
        total = int(mixture.lengths[mixture.order(0)].sum())  # the same in every epoch: only the order changes
        self.per_epoch = max(total - 1, 0) // context
        if self.per_epoch == 0:
            raise DataError(
                f"the mixture has {total:,} tokens, fewer than one sequence of {context:,}; add rows or repeats"
            )
        self._ends = lru_cache(maxsize=2)(lambda epoch: np.cumsum(mixture.lengths[mixture.order(epoch)]))
        self._marks = lru_cache(maxsize=2)(lambda epoch: np.cumsum(mixture.target_counts[mixture.order(epoch)]))

    def items(self, first: int, count: int) -> ChatBatch:
        tokens = np.empty((count, self._context + 1), dtype=np.int64)
        marks = np.empty((count, self._context + 1), dtype=bool)
        for row in range(count):
            self._read(first + row, tokens[row], marks[row])
        targets = tokens[:, 1:].copy()
        if self._only_marked:
            targets[~marks[:, 1:]] = -1
        return ChatBatch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets))

    def target_count(self, first: int, count: int) -> int:
        if not self._only_marked:
            return count * self._context
        total, end = 0, first + count
        while first < end:  # the sequences of one epoch at a time
            epoch, number = divmod(first, self.per_epoch)
            taken = min(end - first, self.per_epoch - number)
            # Targets begin with the second token of the first sequence and end with the last token of the last.
            start = number * self._context + 1
            total += self._marks_before(epoch, start + taken * self._context) - self._marks_before(epoch, start)
            first += taken
        return total

    def _marks_before(self, epoch: int, position: int) -> int:
        """Count the marked tokens before a position of the epoch; only the conversation at the position is read."""
        ends = self._ends(epoch)
        place = int(np.searchsorted(ends, position, side="right"))
        before = int(self._marks(epoch)[place - 1]) if place else 0
        if place == len(ends):
            return before
        _, is_target = self._mixture.row(int(self._mixture.order(epoch)[place]))
        return before + int(is_target[: len(is_target) - int(ends[place] - position)].sum())

    def identity(self, first: int, count: int) -> str:
        epoch, number = divmod(first, self.per_epoch)
        start = int(np.searchsorted(self._ends(epoch), number * self._context, side="right"))
        name = self._mixture.name(int(self._mixture.order(epoch)[start]))
        return f"packed sequences {first:,} to {first + count - 1:,}, the first one in {name}"

    def _read(self, item: int, tokens: np.ndarray, marks: np.ndarray) -> None:
        epoch, number = divmod(item, self.per_epoch)
        order, filled = self._mixture.order(epoch), 0
        for place, start, end in spans(self._ends(epoch), number * self._context, len(tokens)):
            ids, is_target = self._mixture.row(int(order[place]))
            tokens[filled : filled + end - start] = ids[start:end]
            marks[filled : filled + end - start] = is_target[start:end]
            filled += end - start


class PaddedBatches:
    """One conversation per row, padded on the right to the longest of the batch."""

    def __init__(self, mixture: Mixture, padding: int, only_marked: bool) -> None:
        self._mixture, self._padding, self._only_marked = mixture, padding, only_marked
        self.per_epoch = len(mixture)

    def items(self, first: int, count: int) -> ChatBatch:
        rows = [self._mixture.row(number) for number in self._numbers(first, count)]
        longest = max(len(ids) for ids, _ in rows) - 1
        tokens = np.full((count, longest), self._padding, dtype=np.int64)
        targets = np.full((count, longest), -1, dtype=np.int64)
        for row, (ids, is_target) in enumerate(rows):
            tokens[row, : len(ids) - 1] = ids[:-1]
            counts = is_target[1:] if self._only_marked else np.ones(len(ids) - 1, dtype=bool)
            targets[row, : len(ids) - 1] = np.where(counts, ids[1:].astype(np.int64), -1)
        return ChatBatch(torch.from_numpy(tokens), torch.from_numpy(targets))

    def target_count(self, first: int, count: int) -> int:
        numbers = self._numbers(first, count)
        if self._only_marked:
            return int(self._mixture.target_counts[numbers].sum())
        return int(self._mixture.lengths[numbers].sum()) - count

    def identity(self, first: int, count: int) -> str:
        first_of, last_of = (self._mixture.name(n) for n in self._numbers(first, count)[[0, -1]])
        return f"conversations {first:,} to {first + count - 1:,} ({first_of} to {last_of})"

    def _numbers(self, first: int, count: int) -> np.ndarray:
        pairs = [divmod(item, self.per_epoch) for item in range(first, first + count)]
        return np.array([self._mixture.order(epoch)[place] for epoch, place in pairs])


ChatBatches = PackedBatches | PaddedBatches
