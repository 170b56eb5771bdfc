"""Means, deviations, intervals and tests against numpy and scipy's own."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lapcli.report.statistics import compare, rank_correlation, summarise

NUMBERS = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


@settings(deadline=None)
@given(NUMBERS, st.sampled_from([0, 1]))
def test_mean_and_deviation_are_numpys(values, ddof):
    found = summarise(values, ddof)
    assert found.n == len(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.std == pytest.approx(np.std(values, ddof=ddof), abs=1e-9)


def test_one_seed_has_no_deviation_and_none_has_no_mean():
    assert summarise([], 1) is None
    for ddof in (0, 1):  # a spread of one seed is unknown, not zero
        one = summarise([0.5], ddof)
        assert (one.mean, one.std, one.n, one.interval) == (0.5, None, 1, None)


def test_the_interval_is_students():
    values = [75.0, 75.5, 76.4]
    low, high = summarise(values, 0).interval
    expected = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert (low, high) == pytest.approx(expected)


def test_the_paired_test_is_scipys_over_shared_seeds():
    ours = {"0": 0.81, "1": 0.84, "2": 0.80, "7": 0.1}
    base = {"2": 0.79, "0": 0.78, "1": 0.80, "9": 0.9}
    found = compare(ours, base)
    shared = ["0", "1", "2"]
    expected = stats.ttest_rel([ours[s] for s in shared], [base[s] for s in shared])
    assert found.n == 3
    assert found.p == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.difference == pytest.approx((0.03 + 0.04 + 0.01) / 3)


def test_without_pairs_there_is_no_test():
    assert compare({"0": 1.0}, {"1": 1.0}) is None
    one = compare({"0": 1.0}, {"0": 0.5})
    assert (one.difference, one.n, one.p, one.interval) == (0.5, 1, None, None)
    equal = compare({"0": 0.3, "1": 0.4}, {"0": 0.1, "1": 0.2})  # no spread: t would be infinite
    assert equal.p is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=9))
def test_the_rank_correlation_is_spearmans(points):
    x, y = zip(*points, strict=True)
    found = rank_correlation(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
        assert not math.isnan(found)
