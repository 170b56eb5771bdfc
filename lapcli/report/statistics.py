"""Means and deviations over seeds, their intervals, and the paired test against a baseline.

std      sqrt(sum (x - mean)^2 / (n - ddof));  None for n <= ddof
error    of the mean: s / sqrt(n), s with ddof 1; for two seeds, half their difference
interval mean -+ t_{0.975, n-1} s / sqrt(n), s with ddof 1 whatever the table shows
paired   d_i = x_i - b_i over the seeds that both have;  t = mean(d) / (s_d / sqrt(n)),  two-sided p
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Summary:
    mean: float
    std: float | None
    n: int
    interval: tuple[float, float] | None  # 95%, of the mean
    error: float | None = None  # standard, of the mean


@dataclass(frozen=True)
class Paired:
    """A row against the baseline, seed by seed."""

    difference: float
    n: int
    interval: tuple[float, float] | None
    p: float | None  # None: fewer than two pairs, or all differences equal


def summarise(values: Sequence[float], ddof: int) -> Summary | None:
    if not values:
        return None
    n = len(values)
    mean = math.fsum(values) / n
    squares = math.fsum((value - mean) ** 2 for value in values)
    # With ddof 0 a single seed would have the deviation 0, which reads like certainty.
    std = math.sqrt(squares / (n - ddof)) if n > ddof and n > 1 else None
    return Summary(mean, std, n, _interval(mean, squares, n), math.sqrt(squares / (n - 1) / n) if n > 1 else None)


def compare(values: Mapping[str, float], baseline: Mapping[str, float]) -> Paired | None:
    """Return the paired differences over the seeds that both have; None if there is no such seed."""
    differences = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    if not differences:
        return None
    n = len(differences)
    mean = math.fsum(differences) / n
    squares = math.fsum((value - mean) ** 2 for value in differences)
    error = math.sqrt(squares / (n - 1) / n) if n > 1 else 0.0
    # If all differences are equal, only the rounding error of their mean is left.
    if n < 2 or error <= 1e-12 * max(map(abs, differences)):
        return Paired(mean, n, None, None)
    from scipy.special import stdtr

    return Paired(mean, n, _interval(mean, squares, n), float(2 * stdtr(n - 1, -abs(mean / error))))


def _interval(mean: float, squares: float, n: int) -> tuple[float, float] | None:
    if n < 2:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(squares / (n - 1) / n)
    return mean - half, mean + half


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; ties share their mean rank. None for fewer than three points."""
    if len(x) < 3:
        return None
    a, b = _ranks(x), _ranks(y)
    # The mean of all ranks, ties or not: tied values share the mean of their ranks.
    mean = (len(x) + 1) / 2
    top = math.fsum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    bottom = math.sqrt(math.fsum((p - mean) ** 2 for p in a) * math.fsum((q - mean) ** 2 for q in b))
    return top / bottom if bottom > 0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def rise(values: Mapping[float, float]) -> float | None:
    """Return Spearman's correlation of the values with their keys, 0 if all are the same.

    None without the key 0, a baseline, or with fewer than three points.
    """
    if 0 not in values or len(values) < 3:
        return None
    return rank_correlation(list(values), list(values.values())) or 0.0


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through (0, values[0]), (1, values[1]) ..."""
    middle, level = (len(values) - 1) / 2, mean(values)
    spread = math.fsum((place - middle) ** 2 for place in range(len(values)))
    return math.fsum((place - middle) * (value - level) for place, value in enumerate(values)) / (spread or 1.0)


def mean_ratio(values: Sequence[float], base: Sequence[float], places: range) -> float:
    """Return the geometric mean of values / base at those places."""
    return math.exp(mean([math.log(max(values[n], 1e-300) / max(base[n], 1e-300)) for n in places]))


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether this is a finite number; a damaged file may hold something else, which is ignored."""
    # JSON's `true` is an int in Python.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
