"""Batches against hand-written rows."""

import numpy as np
import pytest

from lapcli.data.chat.batches import PackedBatches, PaddedBatches
from lapcli.data.chat.mixture import prepare_mixture

PADDING = 260


def talk(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.fixture
def mixture(data_set, tokenizer):
    rows = [talk("q" * (n % 4 + 1), "a" * (n % 7 + 1)) for n in range(30)]
    return prepare_mixture([data_set("chats", rows)], tokenizer, seed=3, longest=64, needs_targets=True)


def stream(mixture, epoch):
    rows = [mixture.row(int(n)) for n in mixture.order(epoch)]
    return np.concatenate([ids for ids, _ in rows]), np.concatenate([marks for _, marks in rows])


@pytest.mark.parametrize("only_marked", [False, True])
def test_packed_sequences_split_the_stream(mixture, only_marked):
    context = 16
    batches = PackedBatches(mixture, context, only_marked)
    seen = 0
    for epoch in range(2):
        ids, marks = stream(mixture, epoch)
        assert batches.per_epoch == (len(ids) - 1) // context
        for number in range(batches.per_epoch):
            tokens_BT, targets_BT = batches.items(epoch * batches.per_epoch + number, 1)
            part = slice(number * context, number * context + context + 1)
            assert tokens_BT[0].tolist() == ids[part][:-1].tolist()
            expected = ids[part][1:].astype(int)
            if only_marked:
                expected = np.where(marks[part][1:], expected, -1)
            assert targets_BT[0].tolist() == expected.tolist()
            assert batches.target_count(epoch * batches.per_epoch + number, 1) == (expected >= 0).sum()
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("only_marked", [False, True])
def test_padded_rows_are_conversations(mixture, only_marked):
    batches = PaddedBatches(mixture, PADDING, only_marked)
    assert batches.per_epoch == 30
    tokens_BT, targets_BT = batches.items(27, 6)  # over the end of an epoch
    numbers = [*mixture.order(0)[27:], *mixture.order(1)[:3]]
    assert tokens_BT.shape == targets_BT.shape
    assert tokens_BT.shape[1] == max(len(mixture.row(int(n))[0]) for n in numbers) - 1
    for row, number in enumerate(numbers):
        ids, marks = mixture.row(int(number))
        length = len(ids) - 1
        assert tokens_BT[row].tolist() == ids[:-1].tolist() + [PADDING] * (len(tokens_BT[row]) - length)
        counted = marks[1:] if only_marked else np.ones(length, bool)
        expected = np.where(counted, ids[1:].astype(int), -1).tolist()
        assert targets_BT[row].tolist() == expected + [-1] * (len(tokens_BT[row]) - length)
    assert batches.target_count(27, 6) == int((targets_BT >= 0).sum())
