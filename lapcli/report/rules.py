"""The rules that decide the paper's claims, each on grids of runs. `claims.yaml` says which claim has which rule.

Rules compare means over seeds. "Rises with k" is Spearman's rank correlation of the means with the number of Laplacian
heads: at least 0.8 is yes, above 0 partly. A gain of x points is reproduced by at least three quarters of x, partly by
any gain. Without a baseline or a model to compare with it a rule is "not run", never a failure. Heads, drop paths,
measures or layers of the paper's set that the runs lack are listed as missing, and then a claim that holds on the rest
is "partly". A measure over the layers requires all layers; if some were not measured, the others are judged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lapcli.report.grouping import RunGrid
from lapcli.report.paper_tables import DROP_PATH, averages, best_drop_path
from lapcli.report.statistics import mean, mean_ratio, rise, slope

Status = Literal["reproduced", "partly", "not", "not run"]
STRONG, _SHARE = 0.8, 0.75


@dataclass(frozen=True)
class Judgement:
    status: Status
    evidence: str
    missing: tuple[str, ...] = ()  # parts of the paper's set that the runs lack
    holds: bool = False  # on the runs that exist


@dataclass(frozen=True)
class Case:
    """Grids that a claim is judged on: one, or several drop paths of one recipe. `heads` and `drop_paths` are those
    that the claim requires; empty for runs that are not of the paper's recipe, which are judged on all that they have.
    """

    scope: str  # CIFAR10 ..., language, self-supervised
    title: str
    grids: list[RunGrid]
    is_papers: bool
    heads: tuple[int, ...] = ()
    drop_paths: tuple[str, ...] = ()

    def counts(self, heads: int | None) -> bool:
        """Return whether the claim is about this row; it never is about plans that differ by layer."""
        return heads is not None and (not self.heads or heads in self.heads)

    def means(self, grid: RunGrid, metric: str) -> dict[float, float]:
        """Return means over seeds by number of Laplacian heads, fewest first, without rows that have no score."""
        means = {}
        for row in sorted(grid.rows):
            values = (averages(grid, row) if metric == "average" else grid.values(row, metric)).values()
            if values and self.counts(row.heads):
                means[float(row.heads or 0)] = sum(values) / len(values)
        return means

    def absent(self, values: Mapping[float, object], where: str = "") -> list[str]:
        """Return the rows that the claim requires and that are missing."""
        return [("the baseline" if k == 0 else f"{k}L") + where for k in self.heads if k not in values]

    def at(self, rate: str) -> RunGrid | None:
        return next((grid for grid in self.grids if grid.identity.get(DROP_PATH) == rate), None)

    def absent_rates(self, metric: str) -> list[str]:
        """Return the drop paths that the claim requires and that are missing."""
        grids = {rate: self.at(rate) for rate in self.drop_paths}
        return [f"drop path {rate}" for rate, grid in grids.items() if grid is None or not self.means(grid, metric)]

    def rate_in_words(self, grid: RunGrid, before: str = "") -> str:
        """Return the drop path, if there are several; else an empty string."""
        return f"{before}drop path {grid.identity.get(DROP_PATH)}" if len(self.grids) > 1 or self.drop_paths else ""


Judge = Callable[[Case], Judgement]


def judgement(holds: bool, somewhat: bool, evidence: str, missing: Sequence[str] = ()) -> Judgement:
    """Return reproduced if the claim holds and nothing is missing, partly if something is missing or it holds
    somewhat."""
    status: Status = "reproduced" if holds and not missing else "partly" if holds or somewhat else "not"
    return Judgement(status, evidence, tuple(dict.fromkeys(missing)), holds)


def _not_run(metric: str) -> Judgement:
    return Judgement("not run", f"no {metric} of the baseline and of a model with Laplacian heads")


def is_comparison(values: Mapping[float, object]) -> bool:
    """Return whether there are a baseline and a model with Laplacian heads."""
    return 0 in values and len(values) > 1


def in_numbers(values: Mapping[float, float], scale: float = 1.0, digits: int = 2) -> str:
    return ", ".join(f"{k:g}L {value * scale:.{digits}f}" for k, value in values.items())


def _scale(metric: str) -> int:
    """Return the factor to the shown unit: scores and shares are shown in %, other numbers of analyses unscaled."""
    return 100 if "." not in metric or "share" in metric else 1


def gain(metric: str, points: float, heads: int | None = None, exactly: bool = False, best: bool = True) -> Judge:
    """Judge whether the best k (or that of `heads`) gains that many points over the baseline, in %.

    Images are compared at the drop path with the best baseline, so the baselines of all drop paths are required.
    """

    def judge(case: Case) -> Judgement:
        grid = case.grids[0]
        if DROP_PATH in grid.identity:
            runs = [run for one in case.grids for run in one.runs]
            grid = best_drop_path(case.scope, runs, []) or grid
        values = case.means(grid, metric)
        if not is_comparison(values):
            return _not_run(metric)
        others = {k: value for k, value in values.items() if k > 0}
        if heads is not None and heads not in others:
            return Judgement("not run", f"no {metric} of {heads} Laplacian heads")
        top = max(others, key=lambda k: others[k])
        chosen = float(heads) if heads is not None else top
        is_best = not best or heads is None or all(others[chosen] > value for k, value in others.items() if k != chosen)
        gained = 100 * (others[chosen] - values[0])
        evidence = f"{chosen:g}L {gained:+.2f} points over the baseline{case.rate_in_words(grid, ' at ')}"
        evidence += f" ({in_numbers(values, 100)})" + (
            "" if is_best else f"; {top:g}L is as good" if others[top] == others[chosen] else f"; the best is {top:g}L"
        )
        enough = gained > points if exactly else gained >= _SHARE * points
        rates = {rate: case.at(rate) for rate in case.drop_paths}
        unknown = [rate for rate, one in rates.items() if one is None or 0 not in case.means(one, metric)]
        missing = [*case.absent(values), *(f"the baseline at drop path {rate}" for rate in unknown)]
        return judgement(enough and is_best, gained > 0, evidence, missing)

    return judge


def against_baseline(
    metrics: Sequence[str], better: Literal["above", "below"] = "above", share: Literal["all", "most"] = "all"
) -> Judge:
    """Judge whether all k, or most of them, are on one side of the baseline, in each measure and grid of the case."""

    def judge(case: Case) -> Judgement:
        lines, missing = [], []
        parts: list[tuple[int, int]] = []  # for each measure and grid: wins, of how many
        for metric in metrics:
            known = [grid for grid in case.grids if is_comparison(case.means(grid, metric))]
            missing += [metric] if not known else case.absent_rates(metric)
            for grid in known:
                values = case.means(grid, metric)
                sign = 1 if better == "above" else -1
                wins = sum(sign * (value - values[0]) > 0 for k, value in values.items() if k > 0)
                parts.append((wins, len(values) - 1))
                missing += case.absent(values, case.rate_in_words(grid, " at "))
                name = f"{metric}: " if len(metrics) > 1 else ""
                rate = case.rate_in_words(grid)
                digits = 2 if _scale(metric) == 100 else 1
                lines.append(name + (f"{rate}: " if rate else "") + in_numbers(values, _scale(metric), digits))
        if not parts:
            return _not_run(" and ".join(metrics))
        wins, number = (sum(part[place] for part in parts) for place in (0, 1))
        evidence = f"{wins} of {number} {better} the baseline ({'; '.join(lines)})"
        holds = all(right == of if share == "all" else 2 * right > of for right, of in parts)
        somewhat = wins > 0 if share == "all" else any(2 * right > of for right, of in parts)
        return judgement(holds, somewhat, evidence, missing)

    return judge


def rising(metrics: Sequence[str] = (), falling: Sequence[str] = ()) -> Judge:
    """Judge whether each measure rises or falls with k, in every grid of the case."""
    signs = {**dict.fromkeys(metrics, 1), **dict.fromkeys(falling, -1)}

    def judge(case: Case) -> Judgement:
        lines, missing = [], []
        correlations: list[float] = []
        for metric, sign in signs.items():
            known = [grid for grid in case.grids if rise(case.means(grid, metric)) is not None]
            missing += [metric] if not known else case.absent_rates(metric)
            for grid in known:
                values = case.means(grid, metric)
                correlation = rise(values) or 0.0
                correlations.append(sign * correlation)
                missing += case.absent(values, case.rate_in_words(grid, " at "))
                rate = case.rate_in_words(grid, " at ")
                lines.append(f"{metric}{rate}: correlation {correlation:+.2f} ({in_numbers(values, _scale(metric))})")
        if not correlations:
            return Judgement(
                "not run", f"{' and '.join(signs)} of the baseline and two other numbers of heads are needed"
            )
        return judgement(min(correlations) >= STRONG, max(correlations) > 0, "; ".join(lines), missing)

    return judge


def best_rows(metric: str, best: Sequence[int], below: int | None = None) -> Judge:
    """Judge whether the best rows are those and, with `below`, whether that row is under the baseline."""

    def judge(case: Case) -> Judgement:
        grid = case.grids[0]
        values = case.means(grid, metric)
        needed = {0, *best, *(() if below is None else (below,))}
        absent = sorted(k for k in needed if k not in values)
        if absent or len(values) <= len(best) + 1:
            return Judgement("not run", f"no {metric} of " + ", ".join(f"{k}L" for k in absent or ["the others"]))
        # These rows may tie with each other, as in the paper's own table; with another row, they are not the best.
        ahead = {k: sum(v > values[k] if o in best else v >= values[k] for o, v in values.items()) for k in best}
        hits = [k for k in best if ahead[k] < len(best)]
        ranked = sorted(values, key=lambda k: values[k], reverse=True)[: len(best)]
        parts = [len(hits) == len(best)] + ([values[below] < values[0]] if below is not None else [])
        rate = case.rate_in_words(grid, " at ")
        evidence = f"best{rate}: {', '.join(f'{k:g}L' for k in ranked)} ({in_numbers(values, 100)})"
        return judgement(all(parts), bool(hits) or any(parts), evidence, case.absent(values))

    return judge


def comparable(metric: str, points: float, best: int) -> Judge:
    """Judge whether more than half of the k are within `points` of the baseline, and `best` is the best of all."""

    def judge(case: Case) -> Judgement:
        values = case.means(case.grids[0], metric)
        if not is_comparison(values):
            return _not_run(metric)
        others = {k: value for k, value in values.items() if k > 0}
        near = sum(100 * abs(value - values[0]) <= points for value in others.values())
        is_best = best in others and all(others[best] > value for k, value in values.items() if k != best)
        evidence = f"{near} of {len(others)} within {points:g} points of the baseline, "
        evidence += f"{best}L is {'' if is_best else 'not '}the best ({in_numbers(values, 100)})"
        parts = [2 * near > len(others), is_best]
        return judgement(all(parts), any(parts), evidence, case.absent(values))

    return judge


def falls_by(metric: str, share: float) -> Judge:
    """Judge whether the measure falls by that share from the baseline to all heads Laplacian."""

    def judge(case: Case) -> Judgement:
        values, heads = case.means(case.grids[0], metric), case.grids[0].all_heads
        if 0 not in values or heads not in values:
            return Judgement("not run", f"{metric} of the baseline and of all {heads} heads Laplacian is needed")
        fall = 1 - values[heads] / values[0] if values[0] else 0.0
        evidence = f"{values[0]:.1f} to {values[heads]:.1f}, {fall:.1%} less ({in_numbers(values, 1, 1)})"
        return judgement(fall >= _SHARE * share, fall > 0, evidence, case.absent(values))

    return judge


def shares_meet() -> Judge:
    """Judge whether within-class and between-class shares are far apart for few Laplacian heads and close for many."""

    def judge(case: Case) -> Judgement:
        grid = case.grids[0]
        within, between = (case.means(grid, f"anova.{part}_class_share") for part in ("within", "between"))
        ratios = {k: within[k] / between[k] for k in within if between.get(k)}
        half = grid.all_heads / 2
        few, many = {k: r for k, r in ratios.items() if k <= half}, {k: r for k, r in ratios.items() if k > half}
        if 0 not in few or not many:
            needed = "the shares of the baseline and of more than half of the heads Laplacian are needed"
            return Judgement("not run", needed)
        holds = all(r >= 1.5 for r in few.values()) and all(2 / 3 <= r <= 1.5 for r in many.values())
        narrows = abs(math.log(ratios[max(many)])) < abs(math.log(ratios[0]))
        return judgement(holds, narrows, f"within over between: {in_numbers(ratios)}", case.absent(ratios))

    return judge


_NC2 = tuple(f"nc2_{what}_{of}" for what in ("equinorm", "equiangular") for of in ("centred", "classifier"))


def nearer_collapse() -> Judge:
    """Judge whether each of the measures NC2 to NC4 is smaller with the most Laplacian heads than without."""

    def judge(case: Case) -> Judgement:
        lines, nearer, missing = [], [], []
        for short in (*_NC2, "nc3", "nc4"):
            values = case.means(case.grids[0], f"collapse.{short}")
            if not is_comparison(values):
                missing.append(short)
                continue
            last = max(values)
            nearer.append(values[last] < values[0])
            missing += case.absent(values)
            lines.append(f"{short} {values[0]:.3g} to {values[last]:.3g}")
        if not nearer:
            return Judgement("not run", "the collapse measures of the baseline and of another model are needed")
        evidence = f"{sum(nearer)} of {len(nearer)} smaller at the most heads: {', '.join(lines)}"
        return judgement(all(nearer), any(nearer), evidence, missing)

    return judge


def higher_across_layers(metric: str) -> Judge:
    """Judge whether every k is above the baseline in every layer."""

    def judge(case: Case) -> Judgement:
        values, missing = _by_layer(case, case.grids[0], metric)
        if not is_comparison(values):
            return Judgement("not run", f"{metric} of the baseline and of another model in the same layers is needed")
        base = values.pop(0)
        above = {k: sum(one > other for one, other in zip(layers, base, strict=True)) for k, layers in values.items()}
        ends = {0.0: base[-1], **{k: layers[-1] for k, layers in values.items()}}
        evidence = (
            f"of {len(base)} layers above the baseline: {in_numbers(above, 1, 0)} (last layer: {in_numbers(ends)})"
        )
        return judgement(all(n == len(base) for n in above.values()), any(above.values()), evidence, missing)

    return judge


def steeper(metric: str, level: Literal["all layers", "deeper half"]) -> Judge:
    """Judge whether, with k, the measure rises more steeply over the layers and its level in them is higher."""

    def judge(case: Case) -> Judgement:
        values, missing = _by_layer(case, case.grids[0], metric)
        levels = {
            k: mean(layers[len(layers) // 2 :] if level == "deeper half" else layers) for k, layers in values.items()
        }
        correlation = rise(levels)
        if correlation is None:
            needed = f"{metric} of the baseline and two other numbers of heads in the same layers is needed"
            return Judgement("not run", needed)
        correlations = [correlation]
        evidence = f"mean of the {level}: correlation {correlation:+.2f} ({in_numbers(levels, 1, 3)})"
        if len(next(iter(values.values()))) > 1:
            slopes = {k: slope(layers) for k, layers in values.items()}
            correlations.append(rise(slopes) or 0.0)
            evidence += f"; slope a layer: correlation {correlations[1]:+.2f} ({in_numbers(slopes, 1, 4)})"
        return judgement(min(correlations) >= STRONG, max(correlations) > 0, evidence, missing)

    return judge


def _by_layer(case: Case, grid: RunGrid, metric: str) -> tuple[dict[float, list[float]], list[str]]:
    """Return, by Laplacian heads, the means over seeds in each layer that all models have; and what is missing."""
    depth = int(grid.runs[0].recipe["model"]["layers"])
    by_heads: dict[float, list[dict[int, float]]] = {}
    for row in sorted(grid.rows):
        measured = [run.by_layer[metric] for run in grid.rows[row].values() if metric in run.by_layer]
        if row.heads is not None and case.counts(row.heads) and measured:
            most = max(len(layers) for layers in measured)
            by_heads[float(row.heads)] = [layers for layers in measured if len(layers) == most]
    shared = set(range(depth)).intersection(*(layers for runs in by_heads.values() for layers in runs))
    layers = sorted(shared) if by_heads else []
    values = {k: [mean([run[layer] for run in runs]) for layer in layers] for k, runs in by_heads.items() if layers}
    left = [f"{depth - len(layers)} of the {depth} layers"] if len(layers) < depth else []
    return values, [*case.absent(values), *left]


def spectrum(leading: Literal["comparable", "larger"]) -> Judge:
    """Judge whether the spectrum's head is comparable to the baseline's or larger, and its tail relatively smaller.

    Head: the leading hundredth of the eigenvalues; tail: the second half; ratios are geometric means. `comparable`: a
    head like the baseline's and a smaller tail; `larger`: the head grows, and the tail grows less.
    """

    def judge(case: Case) -> Judgement:
        by_heads = _spectra(case, case.grids[0])
        if not is_comparison(by_heads):
            return Judgement("not run", "the spectra of the baseline and of another model are needed")
        missing = case.absent(by_heads)
        lines, holds = [], []
        base = by_heads.pop(0)
        for k, values in by_heads.items():
            ranks = _ranks_shown(base, values)
            head = mean_ratio(values, base, range(max(1, len(ranks) // 100)))
            tail = mean_ratio(values, base, range(len(ranks) // 2, len(ranks)))
            lines.append(f"{k:g}L head x{head:.2f} tail x{tail:.2f}")
            if leading == "comparable":
                holds.append(0.8 <= head <= 1.25 and tail < 1)
            else:
                holds.append(head > 1 and tail < head)
        return judgement(all(holds), any(holds), ", ".join(lines) + " of the baseline's", missing)

    return judge


def _spectra(case: Case, grid: RunGrid) -> dict[float, list[float]]:
    """Return, by Laplacian heads, the means over seeds at each rank."""
    name = "spectrum.eigenvalue_mean"
    by_heads = {}
    for row in sorted(grid.rows):
        spectra = [run.series[name] for run in grid.rows[row].values() if name in run.series]
        if row.heads is not None and case.counts(row.heads) and len({len(one) for one in spectra}) == 1:
            by_heads[float(row.heads)] = [mean(values) for values in zip(*spectra, strict=True)]
    return by_heads


def _ranks_shown(one: Sequence[float], other: Sequence[float]) -> range:
    """Return the ranks to compare, without the last eigenvalues, which after centring are only rounding error."""
    ranks = min(len(one), len(other))
    while ranks > 2 and min(one[ranks - 1] / one[0], other[ranks - 1] / other[0]) < 1e-12:
        ranks -= 1
    return range(ranks)


RULES: dict[str, Callable[..., Judge]] = {
    rule.__name__: rule
    for rule in (
        *(gain, against_baseline, rising, best_rows, comparable, falls_by, shares_meet, nearer_collapse),
        *(higher_across_layers, steeper, spectrum),
    )
}
