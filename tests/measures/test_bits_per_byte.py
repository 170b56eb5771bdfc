"""The add-one bigram model, counted by hand."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapcli.measures.bits_per_byte import bigram_bits_per_byte, bits_per_byte
from lapcli.runtime.errors import DataError


def by_counting(train: list[int], validation: list[int], lengths: list[int]) -> float:
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    bits, total = 0.0, 0
    for a, b in pairwise(validation):
        if lengths[b]:
            bits -= math.log2((pairs[a, b] + 1) / (firsts[a] + len(lengths)))
            total += lengths[b]
    return bits / total


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=60),
    st.lists(st.integers(0, 6), min_size=2, max_size=60),
    st.sampled_from([np.uint16, np.int64]),
)
def test_against_counting(train: list[int], validation: list[int], dtype: type) -> None:
    lengths = [1, 2, 3, 1, 5, 4, 0]
    validation = [*validation, 0]
    ours = bigram_bits_per_byte(np.array(train, dtype), np.array(validation, dtype), np.array(lengths))
    assert ours == pytest.approx(by_counting(train, validation, lengths), rel=1e-12)


def test_ids_beyond_sixteen_bits_of_pairs() -> None:
    """A pair's number is beyond 32 bits for a vocabulary of 65,536."""
    lengths = np.ones(65_536, dtype=np.int32)
    train = np.array([65_535, 65_534, 65_535, 65_534], dtype=np.uint16)
    ours = bigram_bits_per_byte(train, train[:2], lengths)
    assert ours == pytest.approx(-math.log2(3 / (2 + 65_536)), rel=1e-12)


def test_a_text_without_bytes_has_no_bits_per_byte() -> None:
    starts = np.full(5, 2, dtype=np.uint16)
    with pytest.raises(DataError, match="the held-out text has no bytes"):
        bigram_bits_per_byte(np.array([0, 1, 2], dtype=np.uint16), starts, np.array([1, 2, 0]))
    assert bits_per_byte(math.log(2), 2, "two bytes") == pytest.approx(0.5)
