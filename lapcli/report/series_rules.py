"""Rules on series: a measure over the layers of a model, and a spectrum over its ranks.

A measure over the layers asks for all layers of the model; where some were not measured in some model, the others are
judged, and those are missing.
"""

import math
from collections.abc import Sequence
from typing import Literal

from lapcli.report.grouping import Grid
from lapcli.report.rules import STRONG, Case, Finding, Judge, in_numbers, is_comparison, judged, rise


def higher_across_layers(metric: str) -> Judge:
    """Every k above the baseline in every layer."""

    def judge(case: Case) -> Finding:
        values, missing = _by_layer(case, case.grids[0], metric)
        if not is_comparison(values):
            return Finding("not run", f"{metric} of the baseline and of another model in the same layers is needed")
        base = values.pop(0)
        above = {k: sum(one > other for one, other in zip(own, base, strict=True)) for k, own in values.items()}
        ends = {0.0: base[-1], **{k: own[-1] for k, own in values.items()}}
        evidence = (
            f"of {len(base)} layers above the baseline: {in_numbers(above, 1, 0)} (last layer: {in_numbers(ends)})"
        )
        return judged(all(n == len(base) for n in above.values()), any(above.values()), evidence, missing)

    return judge


def steeper(metric: str, level: Literal["all layers", "deeper half"]) -> Judge:
    """With k the measure rises more steeply over the layers, and its level in them is higher."""

    def judge(case: Case) -> Finding:
        values, missing = _by_layer(case, case.grids[0], metric)
        levels = {k: _mean(own[len(own) // 2 :] if level == "deeper half" else own) for k, own in values.items()}
        found = rise(levels)
        if found is None:
            needed = f"{metric} of the baseline and two other numbers of heads in the same layers is needed"
            return Finding("not run", needed)
        correlations = [found]
        evidence = f"mean of the {level}: correlation {found:+.2f} ({in_numbers(levels, 1, 3)})"
        if len(next(iter(values.values()))) > 1:
            slopes = {k: _slope(own) for k, own in values.items()}
            correlations.append(rise(slopes) or 0.0)
            evidence += f"; slope a layer: correlation {correlations[1]:+.2f} ({in_numbers(slopes, 1, 4)})"
        return judged(min(correlations) >= STRONG, max(correlations) > 0, evidence, missing)

    return judge


def _by_layer(case: Case, grid: Grid, metric: str) -> tuple[dict[float, list[float]], list[str]]:
    """By Laplacian heads: the means over seeds in each layer that all models have; and what is missing."""
    depth = int(grid.runs[0].recipe["model"]["layers"])
    found: dict[float, list[dict[int, float]]] = {}
    for row in sorted(grid.rows):
        measured = [run.by_layer[metric] for run in grid.rows[row].values() if metric in run.by_layer]
        if row.heads is not None and case.counts(row.heads) and measured:
            most = max(len(layers) for layers in measured)
            found[float(row.heads)] = [layers for layers in measured if len(layers) == most]
    shared = set(range(depth)).intersection(*(layers for own in found.values() for layers in own))
    layers = sorted(shared) if found else []
    values = {k: [_mean([run[layer] for run in own]) for layer in layers] for k, own in found.items() if layers}
    left = [f"{depth - len(layers)} of the {depth} layers"] if len(layers) < depth else []
    return values, [*case.absent(values), *left]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _slope(values: Sequence[float]) -> float:
    """Of the line through the layers with the least squared distance."""
    middle, mean = (len(values) - 1) / 2, _mean(values)
    spread = math.fsum((layer - middle) ** 2 for layer in range(len(values)))
    return math.fsum((layer - middle) * (value - mean) for layer, value in enumerate(values)) / (spread or 1.0)


def spectrum(leading: Literal["comparable", "larger"]) -> Judge:
    """Head: the leading hundredth of the eigenvalues; tail: the second half; ratios are geometric means.

    `comparable`: a head as the baseline's and a smaller tail; `larger`: the head grows, and the tail less than it.
    """

    def judge(case: Case) -> Finding:
        by_heads = _spectra(case, case.grids[0])
        if not is_comparison(by_heads):
            return Finding("not run", "the spectra of the baseline and of another model are needed")
        missing = case.absent(by_heads)
        told, holds = [], []
        base = by_heads.pop(0)
        for k, values in by_heads.items():
            ranks = _ranks_shown(base, values)
            head = _ratio(values, base, range(max(1, len(ranks) // 100)))
            tail = _ratio(values, base, range(len(ranks) // 2, len(ranks)))
            told.append(f"{k:g}L head x{head:.2f} tail x{tail:.2f}")
            if leading == "comparable":
                holds.append(0.8 <= head <= 1.25 and tail < 1)
            else:
                holds.append(head > 1 and tail < head)
        return judged(all(holds), any(holds), ", ".join(told) + " of the baseline's", missing)

    return judge


def _spectra(case: Case, grid: Grid) -> dict[float, list[float]]:
    """By Laplacian heads: the means over seeds at each rank."""
    name = "spectrum.eigenvalue_mean"
    by_heads = {}
    for row in sorted(grid.rows):
        found = [run.series[name] for run in grid.rows[row].values() if name in run.series]
        if row.heads is not None and case.counts(row.heads) and found and len({len(series) for series in found}) == 1:
            by_heads[float(row.heads)] = [_mean(values) for values in zip(*found, strict=True)]
    return by_heads


def _ranks_shown(one: Sequence[float], other: Sequence[float]) -> range:
    """Centring leaves a last eigenvalue that is rounding."""
    ranks = min(len(one), len(other))
    while ranks > 2 and min(one[ranks - 1] / one[0], other[ranks - 1] / other[0]) < 1e-12:
        ranks -= 1
    return range(ranks)


def _ratio(values: Sequence[float], base: Sequence[float], ranks: range) -> float:
    logs = [math.log(max(values[rank], 1e-300) / max(base[rank], 1e-300)) for rank in ranks]
    return math.exp(sum(logs) / len(logs))


RULES = {rule.__name__: rule for rule in (higher_across_layers, steeper, spectrum)}
