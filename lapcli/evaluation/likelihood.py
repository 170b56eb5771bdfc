"""Log-likelihoods of continuations, whose shared context is computed once.

A question is a context and its continuations. A forward has one row per question: the context, then the continuations
side by side, each with the positions after the context and masked from the others. The head is applied only where a
token is predicted. A question whose continuations are single tokens (letters) needs only its context: one row, one
predicting position.

Shapes: B questions, T tokens of a row, N predicting positions, C width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lapcli.models.gpt import GPT, KVCache
from lapcli.runtime.devices import has_float64
from lapcli.runtime.errors import LapError

_LOGITS_AT_ONCE = 1 << 24  # elements of a block of logits, to limit the memory

NOT_FINITE = "the model produces logits that are not finite; these weights cannot be evaluated"


class Question(NamedTuple):
    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        """The number of tokens in its row, without each continuation's last token, which is only predicted."""
        return len(self.context) + sum(len(continuation) - 1 for continuation in self.continuations)


class Likelihood(NamedTuple):
    logprob: float
    is_greedy: bool  # every token is the likeliest one


class _SideBySide(KVCache):
    """Positions and mask of rows with continuations side by side, in the form of a cache that stores nothing."""

    def __init__(self, positions_BT: Tensor, mask_B1TT: Tensor) -> None:
        self.position = 0
        self.mask = mask_B1TT
        self._positions_BT = positions_BT

    def positions(self, tokens: int) -> slice | Tensor:
        return self._positions_BT

    def advance(self, tokens: int) -> None:
        pass

    def insert(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        return k_BGTD, v_BGTD


def score(model: GPT, questions: Sequence[Question], batch: int) -> Iterator[tuple[int, list[Likelihood]]]:
    """Yield the number of a question and the likelihoods of its continuations.

    Rows are sorted by length, the longest first, so that a batch has little padding.
    """
    for question in questions:
        if not question.context or not all(question.continuations):
            raise LapError("an empty context or continuation has no likelihood")
    order = sorted(range(len(questions)), key=lambda number: (-questions[number].length, number))
    for start in range(0, len(order), batch):
        numbers = order[start : start + batch]
        yield from zip(numbers, _score_batch(model, [questions[number] for number in numbers]), strict=True)


@torch.inference_mode()
def _score_batch(model: GPT, questions: Sequence[Question]) -> list[list[Likelihood]]:
    device = model.embed.weight.device
    longest = max(question.length for question in questions)
    tokens_BT = torch.zeros(len(questions), longest, dtype=torch.long)
    positions_BT = torch.zeros_like(tokens_BT)
    segments_BT = torch.full_like(tokens_BT, -1)  # 0: the context, n: the n-th continuation, -1: padding
    places: list[list[list[int]]] = []  # question, continuation: the columns where its tokens are predicted
    for row, (context, continuations) in enumerate(questions):
        end = len(context)
        tokens_BT[row, :end] = torch.tensor(context)
        positions_BT[row, :end] = torch.arange(end)
        segments_BT[row, :end] = 0
        columns_of_row = []
        for number, continuation in enumerate(continuations, start=1):
            inputs = len(continuation) - 1
            segment = slice(end, end + inputs)
            tokens_BT[row, segment] = torch.tensor(continuation[:-1], dtype=torch.long)
            positions_BT[row, segment] = torch.arange(len(context), len(context) + inputs)
            segments_BT[row, segment] = number
            # The last token of the context predicts the first token of every continuation.
            columns_of_row.append([len(context) - 1, *range(end, end + inputs)])
            end += inputs
        places.append(columns_of_row)
    cache = None
    if int(segments_BT.max()) > 0:  # else plain causal rows, whose padding comes after every position that is read
        cache = _SideBySide(positions_BT.to(device), _mask(positions_BT, segments_BT).to(device))
    x_BTC = model.hidden(tokens_BT.to(device), cache)

    # Each predicting position is listed once, although continuations share the end of their context.
    positions = dict.fromkeys((row, place) for row, lists in enumerate(places) for each in lists for place in each)
    predicting = {position: number for number, position in enumerate(positions)}
    wanted: list[list[int]] = [[] for _ in predicting]
    for row, question in enumerate(questions):
        for each, continuation in zip(places[row], question.continuations, strict=True):
            for place, token in zip(each, continuation, strict=True):
                wanted[predicting[row, place]].append(token)
    rows, columns = zip(*predicting, strict=True)
    by_position = _log_probabilities(model, x_BTC[list(rows), list(columns)], wanted)
    return [
        [
            _likelihood(
                [by_position[predicting[row, place]][token] for place, token in zip(each, continuation, strict=True)]
            )
            for each, continuation in zip(places[row], question.continuations, strict=True)
        ]
        for row, question in enumerate(questions)
    ]


def _mask(positions_BT: Tensor, segments_BT: Tensor) -> Tensor:
    """Return a (B, 1, T, T) mask: a position attends to the context and to earlier tokens of its own continuation."""
    query, key = segments_BT[:, :, None], segments_BT[:, None, :]
    # Padding (segment -1, position 0) attends to itself: a query without any key would be NaN.
    not_later = positions_BT[:, None, :] <= positions_BT[:, :, None]
    return (((key == 0) | (key == query)) & not_later)[:, None]


def _log_probabilities(model: GPT, x_NC: Tensor, wanted: list[list[int]]) -> list[dict[int, Likelihood]]:
    """Return the likelihoods of the wanted tokens at each position; logits are float32, summed in float64 if the device
    has it."""
    likelihoods: list[dict[int, Likelihood]] = []
    at_once = max(1, _LOGITS_AT_ONCE // model.config.vocab)
    for start in range(0, len(x_NC), at_once):
        logits_NV = model.logits(x_NC[start : start + at_once])
        if not torch.isfinite(logits_NV).all():
            raise LapError(NOT_FINITE)
        if has_float64(logits_NV.device):
            logits_NV = logits_NV.double()
        total_N = logits_NV.logsumexp(dim=-1)
        likeliest_N = logits_NV.argmax(dim=-1).tolist()
        block = wanted[start : start + at_once]
        # One gather for all positions: each copy from the device is a host sync.
        rows = [row for row, tokens in enumerate(block) for _ in tokens]
        logprobs = iter((logits_NV[rows, [token for tokens in block for token in tokens]] - total_N[rows]).tolist())
        likelihoods += [
            {token: Likelihood(next(logprobs), token == likeliest) for token in tokens}
            for tokens, likeliest in zip(block, likeliest_N, strict=True)
        ]
    return likelihoods


def _likelihood(tokens: Sequence[Likelihood]) -> Likelihood:
    return Likelihood(sum(token.logprob for token in tokens), all(token.is_greedy for token in tokens))
