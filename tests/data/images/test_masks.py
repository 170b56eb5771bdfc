"""Masks: their counts by the formula, their shape by the rule, and that they depend on their key alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.images.crops import block_mask, deal_masks, mask_counts

PAPER = {"grid": (14, 14), "probability": 0.5, "ratios": (0.1, 0.5)}


def test_counts_of_the_papers_group():
    """448 global crops: 224 are masked, the i-th with int(196 (0.1 + 0.4 i / 224)) patches."""
    masks = deal_masks(448, **PAPER, key=(0, 0, 0))
    found = sorted(masks.sum(1).tolist())
    expected = [0] * 224 + [int(196 * (0.1 + 0.4 * i / 224)) for i in range(1, 225)]
    assert found == pytest.approx(sorted(expected), abs=1)  # the grid's points may round to either side
    assert np.mean(found[224:]) == pytest.approx(58.5, abs=0.1)
    assert found[-1] == 98


def test_both_crops_are_masked():
    masks = deal_masks(448, **PAPER, key=(0, 0, 0)).reshape(2, 224, 196).any(2)
    assert abs(int(masks[0].sum()) - 112) < 40
    assert int(masks.sum()) == 224


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 14), st.integers(2, 14), st.floats(0.0, 0.9), st.integers(0, 10**6))
def test_a_block_mask_has_exactly_its_count(rows, columns, share, seed):
    count = int(share * rows * columns)
    mask = block_mask((rows, columns), count, np.random.default_rng(seed))
    assert mask.shape == (rows, columns)
    assert int(mask.sum()) == count


def test_masks_come_in_blocks():
    """A masked patch has far more masked neighbours than one drawn alone would have (the share of all masked)."""
    masks = [block_mask((14, 14), 60, np.random.default_rng(seed)) for seed in range(50)]
    beside = np.mean([(m[:, 1:] & m[:, :-1]).sum() / m[:, :-1].sum() for m in masks])
    assert beside > 0.6 > 2 * 60 / 196 - 0.05


def test_the_key_is_all_that_matters():
    first = deal_masks(20, **PAPER, key=(3, 7, 1))
    np.random.seed(5)
    assert np.array_equal(first, deal_masks(20, **PAPER, key=(3, 7, 1)))
    for other in ((4, 7, 1), (3, 8, 1), (3, 7, 2)):
        assert not np.array_equal(first, deal_masks(20, **PAPER, key=other))


def test_counts_by_hand():
    assert mask_counts(8, 100, 0.5, (0.1, 0.5)) == [20, 30, 40, 50]
    assert mask_counts(1, 100, 0.5, (0.1, 0.5)) == []
