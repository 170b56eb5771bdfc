"""The effects of a designed experiment's factors on the gain over the baseline.

A corner is a table of the report: runs that agree in every factor. Its gain is the paired difference from the baseline,
a number for each seed. With C corners of n_c seeds, half of them at the high level of a factor,

    gain     mean over corners of the mean gain
    effect   mean gain at the high level - mean gain at the low level
    s^2      sum over corners of squared deviations from the corner's mean / sum (n_c - 1)
    interval effect -+ t_{0.975, sum (n_c - 1)} s sqrt(sum w_c^2 / n_c),  w_c = -+1 / (corners of that level)

so that seeds give the noise and other factors do not.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lapcli.report.assemble import Report, baseline_of, resolve
from lapcli.report.forms import Entry, Table
from lapcli.report.grouping import RowKey, RunGrid, in_words, title_words
from lapcli.report.tables import ScoreColumn, column_of, p_text
from lapcli.runtime.errors import UsageError


@dataclass(frozen=True)
class Corner:
    grid: RunGrid
    gains: list[float]  # by seed

    @property
    def mean(self) -> float:
        return math.fsum(self.gains) / len(self.gains)


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of the corners' gains, with its interval and p-value."""

    value: float
    interval: tuple[float, float] | None
    p: float | None


def contrast(corners: Sequence[Corner], weights: Sequence[float]) -> Contrast:
    value = math.fsum(weight * corner.mean for weight, corner in zip(weights, corners, strict=True))
    freedom = sum(len(corner.gains) - 1 for corner in corners)
    if freedom < 1:
        return Contrast(value, None, None)
    from scipy.special import stdtr, stdtrit

    squares = math.fsum((gain - corner.mean) ** 2 for corner in corners for gain in corner.gains)
    spread = math.fsum(weight**2 / len(corner.gains) for weight, corner in zip(weights, corners, strict=True))
    error = math.sqrt(squares / freedom * spread)
    half = float(stdtrit(freedom, 0.975)) * error
    p = float(2 * stdtr(freedom, -abs(value / error))) if error > 0 else None
    return Contrast(value, (value - half, value + half), p)


def effect_tables(report: Report, factors: Sequence[str], columns: Sequence[str], baseline: str | None) -> list[Table]:
    """Make a table for each measure and each row but the baseline; UsageError if the runs are not such a design."""
    tables = []
    for objective in dict.fromkeys(grid.objective for grid in report.grids):
        grids = [grid for grid in report.grids if grid.objective == objective]
        rows = dict.fromkeys(row for grid in grids for row in grid.rows if row != baseline_of(grid, baseline))
        for name in columns:
            for row in sorted(rows):
                corners = _corners(grids, name, row, baseline)
                if corners:
                    metric = _full(name, [corners[0].grid])
                    tables.append(_table(corners, factors, column_of(metric, corners[0].grid.number(metric)), row))
    if not tables:
        raise UsageError(f"--effects: no run with {', '.join(columns)} has a baseline of the same recipe and seed")
    return tables


def _full(name: str, grids: Sequence[RunGrid]) -> str:
    names = [full for grid in grids for full in resolve(name, grid.metrics())]
    return names[0] if names else name


def _corners(grids: Sequence[RunGrid], name: str, row: RowKey, baseline: str | None) -> list[Corner]:
    corners = []
    for grid in grids:
        plain = baseline_of(grid, baseline)
        if plain is None or row not in grid.rows:
            continue
        metric = _full(name, [grid])
        ours, theirs = grid.values(row, metric), grid.values(plain, metric)
        gains = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        if gains:
            corners.append(Corner(grid, gains))
    return corners


def _table(corners: Sequence[Corner], factors: Sequence[str], column: ScoreColumn, row: RowKey) -> Table:
    every = contrast(corners, [1 / len(corners)] * len(corners))
    rows = [[Entry("all corners"), Entry(""), Entry(""), Entry(_text(column, every))]]
    for key in factors:
        levels = _levels(corners, key)
        places = [levels.index(corner.grid.identity[key]) for corner in corners]
        # Divided by the corners of that level, which need not be equally many when runs are missing.
        weights = [(1 if place else -1) / places.count(place) for place in places]
        sides = [[corner.mean for corner, at in zip(corners, places, strict=True) if at == side] for side in (0, 1)]
        low, high = (
            f"{in_words(level)}: {column.signed(math.fsum(side) / len(side))}"
            for level, side in zip(levels, sides, strict=True)
        )
        rows.append(
            [Entry(title_words(key)), Entry(low), Entry(high), Entry(_text(column, contrast(corners, weights)))]
        )
    seeds = sum(len(corner.gains) for corner in corners)
    return Table(
        f"{corners[0].grid.objective.replace('_', ' ')}: {column.label}, row {row.label} minus the baseline",
        ["factor", "gain at the low level", "at the high level", "effect, 95% interval"],
        rows,
        [
            f"{len(corners)} corners, {seeds} paired differences; intervals from the spread of seeds within corners, "
            "not corrected for the number of factors."
        ],
    )


def _levels(corners: Sequence[Corner], key: str) -> list[str]:
    levels = {corner.grid.identity[key] for corner in corners if key in corner.grid.identity}
    if len(levels) != 2:
        shown = ", ".join(sorted(map(in_words, levels))) or "none"
        raise UsageError(f"--effects: {key} needs two values over these runs, but has {shown}; name other keys")
    values = [json.loads(level) for level in levels]
    if all(isinstance(value, int | float) for value in values):
        # As numbers: as texts, 1e-05 would be above 0.001.
        return sorted(levels, key=lambda level: float(json.loads(level)))
    return sorted(levels)


def _text(column: ScoreColumn, contrast: Contrast) -> str:
    text = column.signed(contrast.value)
    if contrast.interval is not None:
        text += f" [{column.signed(contrast.interval[0])}, {column.signed(contrast.interval[1])}]"
    return text if contrast.p is None else f"{text} {p_text(contrast.p)}"
