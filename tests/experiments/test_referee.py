"""The referee of ladders: its parts against scipy and by hand, and end to end on simulated ladders."""

import math

import numpy as np
import pytest
from scipy import stats

from lapcli.experiments.referee import Rung, Trend, detectable, holm, judge
from lapcli.experiments.simulation import validate

BASELINE = [[1.30, 1.31, 1.29], [1.10, 1.11, 1.12, 1.09], [0.95, 0.96]]
COMPUTES = [1e15, 1e16, 1e17]


def rungs(differences, computes=COMPUTES, **seconds):
    return [
        Rung(str(number), compute, base, [b + d for b, d in zip(base, each, strict=True)], **seconds)
        for number, (compute, base, each) in enumerate(zip(computes, BASELINE, differences, strict=False))
    ]


def test_one_rung_gives_the_paired_t_test():
    arm = rungs([[0.03, 0.05, 0.04]], COMPUTES[:1])
    finding = judge({"a": arm}, 0.001)["a"]
    oracle = stats.ttest_rel(arm[0].arm, arm[0].baseline)
    assert finding.adjusted_p == pytest.approx(oracle.pvalue)
    interval = oracle.confidence_interval(0.95)
    assert (finding.difference.low, finding.difference.high) == pytest.approx((interval.low, interval.high))
    assert (finding.verdict, finding.trend, finding.rungs[0].multiplier) == ("hurts", None, None)


def test_the_trend_is_a_line_fitted_to_all_pairs():
    """Slope and value at a target agree with scipy's regression; the deviation is computed within rungs."""
    arm = rungs([[-0.01, -0.02, -0.012], [-0.03, -0.02, -0.028, -0.031], [-0.04, -0.05]])
    trend = Trend(arm)
    places = np.concatenate([[math.log10(rung.compute)] * len(rung.differences) for rung in arm])
    line = stats.linregress(places, np.concatenate([rung.differences for rung in arm]))
    assert trend.slope.value == pytest.approx(line.slope)
    assert trend.at(3e17).value == pytest.approx(line.intercept + line.slope * math.log10(3e17))
    within = [rung.differences - rung.differences.mean() for rung in arm]
    assert trend.deviation == pytest.approx(math.sqrt(np.square(np.concatenate(within)).sum() / 6))
    # A prediction interval for new pairs also includes their scatter.
    mean, new = trend.at(3e17), trend.at(3e17, pairs=2)
    own = stats.t.ppf(0.975, 6) * trend.deviation * math.sqrt(1 / 2)
    assert new.high - new.value == pytest.approx(math.hypot(mean.high - mean.value, own))


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})


def test_detectable_differences_are_found_in_four_of_five_samples():
    effect = detectable(1.0, 1 / 5, 4)
    draws = np.random.default_rng(0).standard_normal((20_000, 5)) + effect
    assert np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.01)


def test_the_multiplier_of_the_baseline_with_twice_the_compute():
    """On an exact power law, with just enough noise for an interval."""

    def loss(compute):
        return 0.9 * (compute / 1e16) ** -0.05

    noise = [1e-5, -1e-5]
    arm = [
        Rung(str(c), c, [loss(c) + e for e in noise], [loss(2 * c) - e for e in noise], [10.0, 11.0], [15.0, 16.5])
        for c in COMPUTES
    ]
    finding = judge({"a": arm}, 1e-4)["a"]
    for rung in finding.rungs:
        assert rung.multiplier.value == pytest.approx(2, rel=0.01)
        assert 2 in rung.multiplier
        assert rung.time_multiplier.value == pytest.approx(2 / 1.5, rel=0.01)  # its steps take 1.5 times as long
    assert finding.verdict == "helps"


def test_an_equal_arm_is_exactly_equal():
    finding = judge({"a": rungs([[0.0] * 3, [0.0] * 4, [0.0] * 2])}, 0.001)["a"]
    assert finding.verdict == "no effect"
    assert (finding.difference.value, finding.adjusted_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("target", "bent", "transfers", "verdict"),
    [
        (5e18, False, True, "helps"),
        (2e19, False, True, "too far to extrapolate"),  # 200 times beyond a ladder that spans 100
        (5e18, True, True, "too far to extrapolate"),
        (5e18, False, False, "too far to extrapolate"),
        (None, True, False, "helps"),  # nothing is extrapolated
    ],
)
def test_extrapolation_needs_span_linearity_and_rates_that_transfer(target, bent, transfers, verdict):
    noise = 1e-3 * np.random.default_rng(0).standard_normal((3, 4))
    middle = -0.09 if bent else -0.04
    given = [list(mean + noise[number][:n]) for number, (mean, n) in enumerate([(-0.03, 3), (middle, 4), (-0.05, 2)])]
    assert judge({"a": rungs(given)}, 0.001, target, rates_transfer=transfers)["a"].verdict == verdict


def test_too_few_pairs_are_reported_with_the_number_needed():
    finding = judge({"a": rungs([[0.01, -0.02, 0.015], [0.02, -0.01, 0.001, 0.01], [0.02, -0.015]])}, 0.002)["a"]
    assert finding.verdict == "not enough pairs"
    assert finding.pairs_needed > 4
    single = judge({"a": [Rung("0", 1e15, [1.0], [1.1])]}, 0.002)["a"]  # no deviation is known
    assert single.verdict == "not enough pairs"


def test_a_held_out_rung_is_predicted_and_not_fitted():
    line = [[-0.01, -0.012, -0.011], [-0.02, -0.021, -0.019, -0.022], [-0.5, -0.52]]
    arm = rungs(line)
    finding = judge({"a": arm}, 0.001, held_out="2")["a"]
    assert finding.at == "1"
    assert finding.held_out.predicted.value == pytest.approx(Trend(arm[:2]).at(1e17).value)
    assert not finding.held_out.is_inside


@pytest.mark.long
def test_simulated_ladders_of_known_truth():
    missed = [check for check in validate() if not check.is_met]
    assert not missed
