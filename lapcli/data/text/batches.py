"""A batch is a function of (seed, step): sequences of a token stream in an order that is computed, not stored.

Sequence n of a run is sequence n % sequences_per_epoch of epoch n // sequences_per_epoch. Sequence i of the stream
covers tokens [i T, i T + T]: the last target of one is the first input of the next, and every token but the stream's
first (and the few after the last complete sequence) is a target once per epoch. The assignment of positions to ranks
changes nothing.

Shapes: B sequences, T tokens of context.
"""

from functools import lru_cache

import numpy as np
import torch

from lapcli.data.token_store import TokenStream
from lapcli.runtime.errors import DataError


class TokenBatches:
    """Batches of a stream; `shuffled`: the stream is already in random order; otherwise each epoch is shuffled."""

    def __init__(self, stream: TokenStream, *, context: int, batch: int, seed: int, shuffled: bool) -> None:
        self.sequences_per_epoch = max(len(stream) - 1, 0) // context
        if self.sequences_per_epoch == 0:
            raise DataError(
                f"the text has {len(stream):,} tokens, fewer than one sequence of {context:,} and its targets; "
                "give more text or a smaller model.context"
            )
        self._stream, self._context, self._batch, self._seed, self._shuffled = stream, context, batch, seed, shuffled
        # Two epochs, because a batch may end one and begin the next. A cache of a bound method would be a reference
        # cycle, and the stream's files would stay open until a garbage collection.
        count = self.sequences_per_epoch
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(count))

    def sequences(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 inputs_BT and targets_BT of positions [first, first + count) of the global batch of `step`."""
        tokens = np.empty((count, self._context + 1), dtype=np.int64)
        for row in range(count):
            epoch, index = divmod(step * self._batch + first + row, self.sequences_per_epoch)
            # A source in random order is read in that order in every epoch, as nanochat's loader does.
            index = index if self._shuffled else int(self._order(epoch)[index])
            tokens[row] = self._stream.read(index * self._context, self._context + 1)
        tokens_BT = torch.from_numpy(tokens)
        return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def identity(self, step: int) -> str:
        """Return the name of a batch, for messages."""
        first, last = step * self._batch, (step + 1) * self._batch - 1
        names = [f"{n % self.sequences_per_epoch:,} of epoch {n // self.sequences_per_epoch}" for n in (first, last)]
        return f"sequences {names[0]} to {names[1]} ({self.sequences_per_epoch:,} an epoch, seed {self._seed})"
