"""The statistics of a ladder: does an arm help, and what does the ladder say about a larger scale?

An arm is compared with the baseline in pairs, which share initial weights, data order and validation set. Within a
rung the differences of pairs are samples of one mean; their standard deviation is pooled over the rungs of an arm,
because three pairs are too few for it. Over rungs the mean is a line in the logarithm of compute.

Outcomes are losses here: lower is better. An accuracy is converted to an error before this module.

    d_ri = y_ri(arm) - y_ri(baseline)         pair i of rung r, with compute C_r
    d_ri = a + b log10(C_r / C_last) + e_ri   the trend, by least squares over all pairs

The compute multiplier of an arm is the compute that the baseline needs for the arm's outcome over the arm's compute,
read off the baseline's curve in log-log coordinates. Its interval is a bootstrap over seeds: differences, baseline
means and their pooled deviations are drawn again, and the curve is fitted again. Resampling three seeds
with replacement would cover the truth in 80% of ladders, not in 95%.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import optimize, stats

Numbers = Sequence[float] | np.ndarray
Verdict = Literal["helps", "hurts", "no effect", "not enough pairs", "too far to extrapolate"]
ALPHA, POWER = 0.05, 0.8
_DRAWS = 4000
_MISFIT = 0.01  # level at which a trend is refused to be a line


@dataclass(frozen=True)
class Rung:
    """The pairs of one arm on one rung: losses and seconds, in the same order of seeds."""

    name: str
    compute: float  # FLOPs of a run
    baseline: Numbers
    arm: Numbers
    baseline_seconds: Numbers = ()
    arm_seconds: Numbers = ()

    @property
    def differences(self) -> np.ndarray:
        return np.asarray(self.arm, float) - np.asarray(self.baseline, float)


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class OnRung:
    """Measurements on a rung, with 95% intervals."""

    name: str
    compute: float
    pairs: int
    difference: Estimate
    multiplier: Estimate | None  # of compute at equal loss; None: the baseline's curve is not known or not falling
    time_multiplier: Estimate | None  # of measured time


@dataclass(frozen=True)
class Finding:
    """A ladder's findings about one arm."""

    verdict: Verdict
    rungs: list[OnRung]
    at: str  # where the verdict holds: a rung or the target
    difference: Estimate  # there; its interval is a prediction by the trend
    trend: Estimate | None  # change of the difference for ten times the compute; None on a single rung
    adjusted_p: float  # by Holm, over all arms
    margin: float
    pairs_needed: int | None  # on each rung, for a decision at the present estimate
    held_out: "HeldOut | None" = None


@dataclass(frozen=True)
class HeldOut:
    """The prediction for a rung excluded from the trend, and the measurement there."""

    rung: str
    predicted: Estimate
    measured: float

    @property
    def is_inside(self) -> bool:
        return self.measured in self.predicted


class Trend:
    """The line through the differences of one arm, with the deviation of pairs pooled within rungs."""

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self.rungs = list(rungs)
        self.origin = math.log10(rungs[-1].compute)
        self.counts = np.array([len(rung.differences) for rung in rungs])
        self.means = np.array([rung.differences.mean() for rung in rungs])
        self.freedom = int(self.counts.sum() - len(rungs))
        spread = sum(float(((rung.differences - rung.differences.mean()) ** 2).sum()) for rung in rungs)
        self.deviation = math.sqrt(spread / self.freedom) if self.freedom > 0 else math.nan
        self._inverse = np.linalg.inv(self._design.T @ (self.counts[:, None] * self._design))
        self.line = self._inverse @ self._design.T @ (self.counts * self.means)

    @property
    def _design(self) -> np.ndarray:
        return np.stack([self._row(rung.compute) for rung in self.rungs])

    def _row(self, compute: float) -> np.ndarray:
        place = math.log10(compute) - self.origin
        return np.array([1.0, place]) if len(self.rungs) > 1 else np.array([1.0])

    def leverage(self, compute: float) -> float:
        row = self._row(compute)
        return float(row @ self._inverse @ row)

    def quantile(self, level: float) -> float:
        return float(stats.t.ppf(level, self.freedom)) if self.freedom > 0 else math.inf

    def at(self, compute: float, *, pairs: int | None = None) -> Estimate:
        """Estimate the mean difference at some compute; with `pairs`, predict the mean of that many new pairs."""
        value = float(self._row(compute) @ self.line)
        variance = self.leverage(compute) + (1 / pairs if pairs else 0.0)
        return _around(value, self.quantile(1 - ALPHA / 2) * self.deviation * math.sqrt(variance))

    @property
    def slope(self) -> Estimate | None:
        if len(self.rungs) == 1:
            return None
        error = self.deviation * math.sqrt(float(self._inverse[1, 1]))
        return _around(float(self.line[1]), self.quantile(1 - ALPHA / 2) * error)

    @property
    def misfit(self) -> float | None:
        """The p-value of lack of fit: rung means deviate from the line by more than the scatter of pairs."""
        more = len(self.rungs) - 2
        if more < 1 or self.freedom < 1 or not self.deviation:
            return None
        off = float((self.counts * (self.means - self._design @ self.line) ** 2).sum()) / more
        return float(stats.f.sf(off / self.deviation**2, more, self.freedom))

    def p(self, compute: float) -> float:
        """The two-sided p-value of "no difference" at some compute."""
        value = self.at(compute).value
        if self.deviation == 0 or math.isnan(self.deviation):
            return 1.0 if value == 0 or math.isnan(self.deviation) else 0.0
        t = value / (self.deviation * math.sqrt(self.leverage(compute)))
        return float(2 * stats.t.sf(abs(t), self.freedom))


def judge(
    arms: Mapping[str, Sequence[Rung]],
    margin: float,
    target: float | None = None,
    held_out: str | None = None,
    rates_transfer: bool = True,
    multipliers: bool = True,
) -> dict[str, Finding]:
    """Judge each arm at the target's compute, or at the largest rung.

    `margin` is the difference below which an effect does not matter; `held_out` names the rung on which the trend is
    tested instead of fitted. Holm's adjustment includes all arms, even the baseline against itself (A/A).
    `multipliers`: also bootstrap the compute multipliers.
    """
    fitted = {name: [rung for rung in rungs if rung.name != held_out] for name, rungs in arms.items()}
    trends = {name: Trend(rungs) for name, rungs in fitted.items()}
    places = {name: target or trend.rungs[-1].compute for name, trend in trends.items()}
    p = {name: trend.p(places[name]) for name, trend in trends.items()}
    adjusted = holm(p)
    findings = {}
    for name, trend in trends.items():
        place = places[name]
        verdict = _verdict(trend, place, margin, adjusted[name], rates_transfer)
        curve = Curve(trend.rungs if multipliers else [])
        tested = [
            HeldOut(rung.name, trend.at(rung.compute, pairs=len(rung.differences)), float(rung.differences.mean()))
            for rung in arms[name]
            if rung.name == held_out
        ]
        findings[name] = Finding(
            verdict=verdict,
            rungs=[_on_rung(rung, trend, curve) for rung in arms[name]],
            at="the target" if target else trend.rungs[-1].name,
            difference=trend.at(place),
            trend=trend.slope,
            adjusted_p=adjusted[name],
            margin=margin,
            pairs_needed=_pairs_needed(trend, place, margin) if verdict == "not enough pairs" else None,
            held_out=tested[0] if tested else None,
        )
    return findings


def _verdict(trend: Trend, place: float, margin: float, p: float, rates_transfer: bool) -> Verdict:
    computes = [rung.compute for rung in trend.rungs]
    reach = max(computes) / min(computes)  # as far beyond the largest rung as the ladder spans
    is_far = place > max(computes) * reach * 1.0001
    is_bent = trend.misfit is not None and trend.misfit < _MISFIT
    if place > max(computes) and (is_far or is_bent or not rates_transfer):
        return "too far to extrapolate"
    if p <= ALPHA:
        return "helps" if trend.at(place).value < 0 else "hurts"
    error = trend.deviation * math.sqrt(trend.leverage(place))
    # Two one-sided tests: the difference is below the margin and above its negative.
    if abs(trend.at(place).value) + trend.quantile(1 - ALPHA) * error < margin:
        return "no effect"
    return "not enough pairs"


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Adjust p-values so that the probability of any false claim is at most the significance level."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = largest
    return adjusted


def detectable(deviation: float, leverage: float, freedom: int, level: float = ALPHA) -> float:
    """Return the smallest difference that a two-sided test at that level finds in 80% of ladders."""
    if freedom < 1 or not math.isfinite(deviation):
        return math.inf
    return _noncentrality(freedom, level) * deviation * math.sqrt(leverage)


@lru_cache
def _noncentrality(freedom: int, level: float) -> float:
    """Return the true t at which a two-sided test is significant with 80% power."""
    critical = stats.t.ppf(1 - level / 2, freedom)
    return float(optimize.brentq(lambda t: stats.nct.sf(critical, freedom, t) - POWER, 0.0, critical + 20.0))


def planned_power(deviation: float, pairs: Mapping[str, int], computes: Mapping[str, float], arms: int) -> float:
    """Return what a planned ladder could detect at its largest rung, at that deviation of pairs."""
    shape = [Rung(name, computes[name], np.zeros(count), np.zeros(count)) for name, count in pairs.items()]
    trend = Trend(shape)
    return detectable(deviation, trend.leverage(shape[-1].compute), trend.freedom, ALPHA / arms)


def _pairs_needed(trend: Trend, place: float, margin: float) -> int | None:
    """Return the pairs on each rung with which an effect of the present size, or of the margin, would be decided."""
    if trend.freedom < 1:
        return None
    size, pairs = max(abs(trend.at(place).value), margin), int(trend.counts.max())

    def is_enough(more: int) -> bool:
        factor = more / pairs
        freedom = round(trend.counts.sum() * factor) - len(trend.counts)
        return detectable(trend.deviation, trend.leverage(place) / factor, freedom) <= size

    return pairs + 1 + bisect_left(range(pairs + 1, 10**6), True, key=is_enough)


def _around(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half)


def _on_rung(rung: Rung, trend: Trend, curve: "Curve") -> OnRung:
    pairs, mean = len(rung.differences), float(rung.differences.mean())
    log_times = np.log(np.asarray(rung.baseline_seconds, float)) - np.log(np.asarray(rung.arm_seconds, float))
    return OnRung(
        rung.name,
        rung.compute,
        pairs,
        _around(mean, trend.quantile(1 - ALPHA / 2) * trend.deviation / math.sqrt(pairs)),
        curve.multiplier(rung.compute, mean, trend, 1 / pairs),
        curve.multiplier(rung.compute, mean, trend, 1 / pairs, log_times) if len(log_times) else None,
    )


class Curve:
    """The baseline's loss over compute: a parabola in log-log coordinates, a line through two rungs."""

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self.rungs = rungs
        self.places = np.log([rung.compute for rung in rungs])
        self.means = np.array([np.mean(rung.baseline) for rung in rungs])
        self.counts = np.array([len(rung.baseline) for rung in rungs])
        self.freedom = int(sum(self.counts) - len(rungs))
        spread = sum(float(np.var(rung.baseline) * len(rung.baseline)) for rung in rungs)
        self.deviation = math.sqrt(spread / self.freedom) if self.freedom > 0 else 0.0

    def multiplier(
        self, compute: float, difference: float, trend: Trend, leverage: float, log_times: np.ndarray | None = None
    ) -> Estimate | None:
        """Return the compute at which the baseline reaches the arm's loss over `compute`, with its interval.

        `log_times`, baseline over arm in pairs: at equal measured time.
        """
        if len(self.rungs) < 2 or trend.freedom < 1 or self.freedom < 1:
            return None
        place = math.log(compute)
        draws = np.random.default_rng(0)
        degree = min(2, len(self.rungs) - 1)

        def multipliers(means: np.ndarray, differences: np.ndarray) -> np.ndarray:
            """One number per column of rung means."""
            centre = self.places.mean()
            powers = np.vander(self.places - centre, degree + 1)
            derivative = np.array([k * (place - centre) ** (k - 1) if k else 0.0 for k in range(degree, -1, -1)])
            with np.errstate(divide="ignore", invalid="ignore"):  # NaN where a drawn mean is negative, or a slope 0
                coefficients = np.linalg.pinv(powers) @ np.log(means)
                level = np.exp(np.vander([place - centre], degree + 1)[0] @ coefficients)
                slope = derivative @ coefficients
                logs = np.log(np.maximum(1 + differences / level, 1e-9)) / slope
            return np.where(slope < 0, logs, np.nan)

        best = multipliers(self.means[:, None], np.array([difference]))[0]
        if not np.isfinite(best):
            return None
        scale = np.sqrt(trend.freedom / draws.chisquare(trend.freedom, _DRAWS)) * trend.deviation
        differences = difference + scale * math.sqrt(leverage) * draws.standard_normal(_DRAWS)
        spread = np.sqrt(self.freedom / draws.chisquare(self.freedom, _DRAWS)) * self.deviation
        noise = draws.standard_normal((len(self.rungs), _DRAWS)) / np.sqrt(self.counts)[:, None]
        logs = multipliers(self.means[:, None] + spread * noise, differences)
        if log_times is not None:
            best += float(log_times.mean())
            error = float(np.std(log_times, ddof=1)) / math.sqrt(len(log_times)) if len(log_times) > 1 else 0.0
            logs = logs + log_times.mean() + error * draws.standard_t(max(1, len(log_times) - 1), _DRAWS)
        logs = logs[np.isfinite(logs)]
        low, high = np.exp(np.quantile(logs, [ALPHA / 2, 1 - ALPHA / 2])) if len(logs) else (0.0, math.inf)
        return Estimate(float(math.exp(min(best, 700))), float(low), float(high))
