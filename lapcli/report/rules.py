"""The rules that decide the paper's claims, each on grids of runs.

Rules go by means over seeds. "Rises with k" is Spearman's rank correlation of the means with the number of Laplacian
heads: at least 0.8 is yes, above 0 partly. A gain of x points is reproduced by at least three quarters of x, partly by
any gain. A number that is missing makes a rule "not run", never a failure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lapcli.report import paper
from lapcli.report.compare import averages, best_drop_path
from lapcli.report.grouping import Grid
from lapcli.report.statistics import rank_correlation

Status = Literal["reproduced", "partly", "not", "not run"]
IMAGES = tuple(paper.CLASSIFICATION)
_STRONG, _SHARE = 0.8, 0.75


@dataclass(frozen=True)
class Finding:
    status: Status
    evidence: str


@dataclass(frozen=True)
class Case:
    """Grids that a claim is judged on: one, or several drop paths of one recipe."""

    scope: str  # CIFAR10 ..., language, self-supervised
    title: str
    grids: list[Grid]
    is_papers: bool


Judge = Callable[[Case], Finding]


def means(grid: Grid, metric: str) -> dict[float, float]:
    """By Laplacian heads of every layer, fewest first; neither gaps nor plans that differ by layer are there."""
    found = {}
    for row in sorted(grid.rows):
        values = (averages(grid, row) if metric == "average" else grid.values(row, metric)).values()
        if values and row.heads is not None:
            found[float(row.heads)] = sum(values) / len(values)
    return found


def _heads_of(grid: Grid) -> int:
    return int(grid.runs[0].recipe["model"]["heads"])


def _told(values: dict[float, float], scale: float = 1.0, digits: int = 2) -> str:
    return ", ".join(f"{k:g}L {value * scale:.{digits}f}" for k, value in values.items())


def _without_baseline(values: dict[float, float], metric: str) -> Finding | None:
    if 0 not in values or len(values) < 2:
        return Finding("not run", f"no {metric} of the baseline and of a model with Laplacian heads")
    return None


def _at_best_baseline(case: Case) -> Grid:
    """Table 1's choice of the drop path."""
    chosen = best_drop_path(case.scope, [run for grid in case.grids for run in grid.runs], [])
    return chosen or case.grids[0]


def gain(metric: str, points: float, heads: int | None = None, *, exactly: bool = False, best: bool = True) -> Judge:
    """The best k (or that of `heads`) gains that many points over the baseline, in %."""

    def judge(case: Case) -> Finding:
        values = means(_at_best_baseline(case) if case.scope in IMAGES else case.grids[0], metric)
        if missing := _without_baseline(values, metric):
            return missing
        others = {k: value for k, value in values.items() if k > 0}
        if heads is not None and heads not in others:
            return Finding("not run", f"no {metric} of {heads} Laplacian heads")
        top = max(others, key=lambda k: others[k])
        chosen = float(heads) if heads is not None else top
        gained = 100 * (others[chosen] - values[0])
        evidence = f"{chosen:g}L {gained:+.2f} points over the baseline ({_told(values, 100)})"
        needed = points if exactly else _SHARE * points
        enough = gained > needed if exactly else gained >= needed
        if enough and (heads is None or not best or top == heads):
            return Finding("reproduced", evidence)
        if heads is not None and best and top != heads:
            evidence += f"; the best is {top:g}L"
        return Finding("partly" if gained > 0 else "not", evidence)

    return judge


def above_baseline(metric: str, expected: Sequence[int]) -> Judge:
    """Every k, in every grid of the case."""

    def judge(case: Case) -> Finding:
        told, above, below = [], 0, 0
        absent: set[int] = set()
        for grid in case.grids:
            values = means(grid, metric)
            if _without_baseline(values, metric):
                continue
            wins = [k for k, value in values.items() if k > 0 and value > values[0]]
            above, below = above + len(wins), below + len(values) - 1 - len(wins)
            absent |= {k for k in expected if k > 0 and k not in values} if case.is_papers else set()
            rate = grid.identity.get("model.drop_path")
            told.append((f"drop path {rate}: " if len(case.grids) > 1 else "") + _told(values, 100))
        if not told:
            return Finding("not run", f"no {metric} of the baseline and of a model with Laplacian heads")
        evidence = f"{above} of {above + below} above the baseline ({'; '.join(told)})"
        if absent:
            evidence += f"; not run: {', '.join(f'{k}L' for k in sorted(absent))}"
        if not below and not absent:
            return Finding("reproduced", evidence)
        return Finding("partly" if above else "not", evidence)

    return judge


def rising(*metrics: tuple[str, int], skip: Callable[[Grid, str], bool] = lambda grid, scope: False) -> Judge:
    """Each measure rises (+1) or falls (-1) with k, in every grid of the case."""

    def judge(case: Case) -> Finding:
        correlations: list[float] = []
        told = []
        for grid in case.grids:
            if skip(grid, case.scope):
                continue
            for metric, sign in metrics:
                values = means(grid, metric)
                found = rank_correlation(list(values), list(values.values())) if 0 in values else None
                if found is None:
                    continue
                correlations.append(sign * found)
                rate = f" at drop path {grid.identity['model.drop_path']}" if len(case.grids) > 1 else ""
                scale = 100 if metric == "top1" or "share" in metric else 1
                told.append(f"{metric}{rate}: correlation {found:+.2f} ({_told(values, scale)})")
        if not correlations or len({metric for metric, _ in metrics}) > len(told):
            names = " and ".join(metric for metric, _ in metrics)
            return Finding("not run", f"{names} of the baseline and two other numbers of heads are needed")
        evidence = "; ".join(told)
        if min(correlations) >= _STRONG:
            return Finding("reproduced", evidence)
        return Finding("partly" if max(correlations) > 0 else "not", evidence)

    return judge


def best_rows(metric: str, expected: set[int], *, below: int | None = None) -> Judge:
    """The best rows are those; with `below`, that row is under the baseline."""

    def judge(case: Case) -> Finding:
        values = means(case.grids[0], metric)
        needed = expected | ({0, below} if below is not None else {0})
        absent = sorted(k for k in needed if k not in values)
        if absent or len(values) <= len(expected) + 1:
            return Finding("not run", f"no {metric} of " + ", ".join(f"{k}L" for k in absent or [*expected]))
        ranked = sorted(values, key=lambda k: values[k], reverse=True)[: len(expected)]
        hits = len(expected & set(map(int, ranked)))
        parts = [hits == len(expected)] + ([values[below] < values[0]] if below is not None else [])
        evidence = f"best: {', '.join(f'{k:g}L' for k in ranked)} ({_told(values, 100)})"
        if all(parts):
            return Finding("reproduced", evidence)
        return Finding("partly" if hits or any(parts) else "not", evidence)

    return judge


def falls_by(metric: str, share: float) -> Judge:
    """From the baseline to all heads Laplacian."""

    def judge(case: Case) -> Finding:
        values, heads = means(case.grids[0], metric), _heads_of(case.grids[0])
        if 0 not in values or heads not in values:
            return Finding("not run", f"{metric} of the baseline and of all {heads} heads Laplacian is needed")
        fall = 1 - values[heads] / values[0]
        evidence = f"{values[0]:.1f} to {values[heads]:.1f}, {fall:.1%} less ({_told(values, 1, 1)})"
        return Finding("reproduced" if fall >= _SHARE * share else "partly" if fall > 0 else "not", evidence)

    return judge


def below_baseline(metric: str) -> Judge:
    def judge(case: Case) -> Finding:
        values = means(case.grids[0], metric)
        if missing := _without_baseline(values, metric):
            return missing
        lower = [k for k, value in values.items() if k > 0 and value < values[0]]
        evidence = f"{len(lower)} of {len(values) - 1} below the baseline ({_told(values, 1, 1)})"
        return Finding("reproduced" if len(lower) == len(values) - 1 else "partly" if lower else "not", evidence)

    return judge


def shares_meet(case: Case) -> Finding:
    """Within-class against between-class share: far apart for few Laplacian heads, near for many."""
    grid = case.grids[0]
    within, between = means(grid, "anova.within_class_share"), means(grid, "anova.between_class_share")
    ratios = {k: within[k] / between[k] for k in within if between.get(k)}
    half = _heads_of(grid) / 2
    few, many = {k: r for k, r in ratios.items() if k <= half}, {k: r for k, r in ratios.items() if k > half}
    if 0 not in few or not many:
        return Finding("not run", "the shares of the baseline and of more than half of the heads Laplacian are needed")
    far, near = [r >= 1.5 for r in few.values()], [2 / 3 <= r <= 1.5 for r in many.values()]
    evidence = f"within over between: {_told(ratios)}"
    if all(far) and all(near):
        return Finding("reproduced", evidence)
    narrows = abs(math.log(ratios[max(many)])) < abs(math.log(ratios[0]))
    return Finding("partly" if narrows else "not", evidence)


NC = (
    *("collapse.nc2_equinorm_centred", "collapse.nc2_equinorm_classifier", "collapse.nc2_equiangular_centred"),
    *("collapse.nc2_equiangular_classifier", "collapse.nc3", "collapse.nc4"),
)


def nearer_collapse(case: Case) -> Finding:
    grid = case.grids[0]
    told, nearer = [], []
    for metric in NC:
        values = means(grid, metric)
        if 0 in values and len(values) > 1:
            last = max(values)
            nearer.append(values[last] < values[0])
            told.append(f"{metric.removeprefix('collapse.')} {values[0]:.3g} to {values[last]:.3g}")
    if not nearer:
        return Finding("not run", "the collapse measures of the baseline and of another model are needed")
    evidence = f"{sum(nearer)} of {len(nearer)} smaller at the most heads: {', '.join(told)}"
    return Finding("reproduced" if all(nearer) else "partly" if any(nearer) else "not", evidence)


def spectrum(kind: Literal["language", "self-supervised"]) -> Judge:
    """Head: the leading hundredth of the eigenvalues; tail: the second half; ratios are geometric means."""

    def judge(case: Case) -> Finding:
        grid = case.grids[0]
        by_heads = {}
        for row in sorted(grid.rows):
            found = [
                run.series["spectrum.eigenvalue_mean"]
                for run in grid.rows[row].values()
                if "spectrum.eigenvalue_mean" in run.series
            ]
            if row.heads is not None and found and len({len(series) for series in found}) == 1:
                by_heads[float(row.heads)] = [sum(values) / len(found) for values in zip(*found, strict=True)]
        if 0 not in by_heads or len(by_heads) < 2:
            return Finding("not run", "the spectra of the baseline and of another model are needed")
        told, holds = [], []
        base = by_heads.pop(0)
        for k, values in by_heads.items():
            ranks = _ranks_shown(base, values)
            head = _ratio(values, base, range(max(1, len(ranks) // 100)))
            tail = _ratio(values, base, range(len(ranks) // 2, len(ranks)))
            told.append(f"{k:g}L head x{head:.2f} tail x{tail:.2f}")
            if kind == "language":
                holds.append((0.8 <= head <= 1.25, tail < 1))
            else:
                holds.append((head > 1, tail < head))
        evidence = ", ".join(told) + " of the baseline's"
        flat = [part for parts in holds for part in parts]
        return Finding(
            "reproduced" if all(flat) else "partly" if any(all(parts) for parts in holds) else "not", evidence
        )

    return judge


def _ranks_shown(one: Sequence[float], other: Sequence[float]) -> range:
    """Centring leaves a last eigenvalue that is rounding."""
    ranks = min(len(one), len(other))
    while ranks > 2 and min(one[ranks - 1] / one[0], other[ranks - 1] / other[0]) < 1e-12:
        ranks -= 1
    return range(ranks)


def _ratio(values: Sequence[float], base: Sequence[float], ranks: range) -> float:
    logs = [math.log(max(values[rank], 1e-300) / max(base[rank], 1e-300)) for rank in ranks]
    return math.exp(sum(logs) / len(logs))


def papers_exception(grid: Grid, scope: str) -> bool:
    return scope == "ImageNet" and grid.identity.get("model.drop_path") == "0.4"
