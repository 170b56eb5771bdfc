"""Means over seeds and the paired comparison with a baseline, by scipy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    mean: float
    std: float | None  # ddof 1; None of one seed, which would read like certainty
    n: int
    interval: Interval | None  # 95%, of the mean

    @property
    def error(self) -> float | None:
        """The standard error of the mean."""
        return None if self.std is None else self.std / math.sqrt(self.n)


@dataclass(frozen=True)
class Paired:
    """A row against the baseline, seed by seed."""

    difference: float
    n: int
    interval: Interval | None
    p: float | None  # None: fewer than two pairs, or all differences equal


def summarise(values: Sequence[float]) -> Summary | None:
    if not values:
        return None
    zeros = compare(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert zeros is not None
    n, mean = len(values), math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else None
    return Summary(mean, std, n, zeros.interval or ((mean, mean) if n > 1 else None))


def compare(values: Mapping[Any, float], baseline: Mapping[Any, float]) -> Paired | None:
    """Return the paired differences over the seeds that both have; None without a common seed."""
    seeds = [seed for seed in values if seed in baseline]
    differences = [values[seed] - baseline[seed] for seed in seeds]
    if not differences:
        return None
    n, mean = len(seeds), math.fsum(differences) / len(seeds)
    # If all differences are equal, only the rounding error of their mean remains.
    if n < 2 or max(abs(value - mean) for value in differences) <= 1e-12 * max(map(abs, differences)):
        return Paired(mean, n, None, None)
    from scipy.stats import ttest_rel

    test = ttest_rel([values[seed] for seed in seeds], [baseline[seed] for seed in seeds])
    interval = test.confidence_interval(0.95)
    return Paired(mean, n, (float(interval.low), float(interval.high)), float(test.pvalue))
