"""The paper's claims, read from `claims.yaml`, and their verdicts on our runs.

A claim is a list of parts, each a relation that the means over seeds have to fulfil. A verdict needs evidence beyond
noise: the paired differences that carry the relation, seed by seed, have to be above zero in a one-sided t-test at 5%.

    reproduced   every part holds, with evidence, on the paper's set of data, heads, drop paths and layers
    partly       some of it: a part is missing, or the difference is there and smaller, or another row is best
    not          the differences are on the other side, beyond noise
    undecided    the noise of these seeds allows either
    not run      there is no baseline, or there are no runs to compare with it

Only runs of the paper's own recipe count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from lapcli.report import paper
from lapcli.report.collect import Grid
from lapcli.same_recipe import DROP_PATHS

Status = Literal["reproduced", "partly", "undecided", "not", "not run"]
Values = dict[int, Any]  # by number of heads, fewest first: an array over seeds, NaN where one has no number
Judged = tuple[Status, int, list[str]]  # with the fewest seeds of a comparison, and the evidence
LEVEL = 0.05
STRONG = 0.8  # Spearman's correlation that counts as "rises with k"


@dataclass(frozen=True)
class Claim:
    key: str
    says: str
    where: str  # in the paper
    of: str  # an experiment of paper.yaml
    parts: list[dict[str, Any]]
    scopes: list[str]
    heads: list[int]
    drop_paths: Literal["each", "best baseline", "any"] = "any"
    left_out: dict[str, list[float]] = field(default_factory=dict)  # drop paths that the paper excludes, by data set


@cache
def claims() -> tuple[Claim, ...]:
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(
        Claim(**{"scopes": (of := paper.EXPERIMENTS[e["of"]])["scopes"], "heads": of["heads"], **e}) for e in entries
    )


@dataclass(frozen=True)
class Finding:
    """A relation on the means, and the differences by seed (rows) that carry it (columns), positive if they do."""

    holds: bool
    text: str
    carried_by: Any = None  # an array; None: the relation says that there is no difference
    needs: Literal["all", "any"] = "all"  # of the differences have to be above noise

    @property
    def seeds(self) -> int:
        return 0 if self.carried_by is None else len(self.carried_by)

    def status(self) -> Status:
        if self.carried_by is None:
            return "reproduced" if self.holds else "not"
        above, number = _p_values(self.carried_by), self.carried_by.shape[1]
        below = np.where(above < 1, 1 - above, 1)  # of the test on the other side
        p = float(above.max() if self.needs == "all" else above.min() * number)
        against = float(below.min() * number if self.needs == "all" else below.max())
        if p <= LEVEL:
            return "reproduced" if self.holds else "partly"
        return "not" if against <= LEVEL and not self.holds else "undecided"


def _p_values(differences: Any) -> Any:
    """Return p of the one-sided paired t-test of each column; 1 without a measure of the noise."""
    p = np.ones(differences.shape[1])
    if len(differences) > 1:
        from scipy.stats import ttest_rel

        noise = np.ptp(differences, axis=0) > 1e-12 * np.abs(differences).max(axis=0)
        if noise.any():
            kept = differences[:, noise]
            p[noise] = ttest_rel(kept, np.zeros_like(kept), alternative="greater").pvalue
    return p


# --- relations: (numbers over seeds by number of heads, settings of the part) -> Finding, or None if not comparable


def _above(values: Values, *, sign: int = 1, share: str = "every", rows: str = "all", **_: Any) -> Finding | None:
    """Every row, or most of them, on one side of the baseline: evidence is their mean difference or, for most,
    the clearest difference, corrected for their number."""
    others = _others(values, rows)
    if not others:
        return None
    wins = sum(sign * (_mean(values[k]) - _mean(values[0])) > 0 for k in others)
    text = f"{wins} of {len(others)} {'above' if sign > 0 else 'below'} the baseline"
    differences = _differences(values, others, sign)
    if share == "every":
        return Finding(wins == len(others), text, differences.mean(axis=1, keepdims=True))
    return Finding(2 * wins > len(others), text, differences, "any")


def _gain(values: Values, *, threshold: float, row: int | None = None, best: bool = False, **_: Any) -> Finding | None:
    """A row, or the best row, gains that many points over the baseline; with `best` it must be the best row."""
    others = _others(values)
    if not others or (row is not None and row not in others):
        return None
    means = {k: _mean(values[k]) for k in others}
    top = max(means, key=lambda k: means[k])
    chosen = top if row is None else row
    gained = 100 * (means[chosen] - _mean(values[0]))
    is_best = not best or all(means[k] < means[chosen] for k in others if k != chosen)
    text = f"{chosen}L {gained:+.2f} points" + ("" if is_best else f"; the best is {top}L")
    differences = _differences(values, others if row is None else [chosen])
    return Finding(gained > threshold and is_best, text, differences, "any" if row is None else "all")


def _falls(values: Values, *, threshold: float, **_: Any) -> Finding | None:
    """The measure falls by that fraction from the baseline to the largest number of heads."""
    others = _others(values, "last")
    if not others or not _mean(values[0]):
        return None
    fall = 1 - _mean(values[others[0]]) / _mean(values[0])
    return Finding(fall >= threshold, f"falls by {fall:.1%}", _differences(values, others, -1))


def _best(values: Values, *, rows: Sequence[int], **_: Any) -> Finding | None:
    """These rows are the best; they may tie with each other, as in the paper's own table, but not with another row."""
    if not set(rows) <= set(_others(values)) or len(values) <= len(rows) + 1:
        return None
    means = {k: _mean(values[k]) for k in values}
    holds = min(means[k] for k in rows) > max(mean for k, mean in means.items() if k not in rows)
    top = sorted(means, key=lambda k: -means[k])[: len(rows)]
    return Finding(holds, f"best: {', '.join(f'{k}L' for k in top)}", _differences(values, rows))


def _rising(values: Values, *, sign: int = 1, **_: Any) -> Finding | None:
    """Spearman's correlation of the means with k; evidence is the slope over k, seed by seed."""
    if not _others(values) or len(values) < 3:
        return None
    from scipy.stats import rankdata

    means = rankdata([_mean(numbers) for numbers in values.values()])
    heads = np.array(list(values), dtype=float)
    correlation = float(np.corrcoef(means, rankdata(heads))[0, 1]) if np.ptp(means) else 0.0
    numbers = np.stack(list(values.values()), axis=1)
    slopes = numbers[~np.isnan(numbers).any(axis=1)] @ (heads - heads.mean())
    return Finding(sign * correlation >= STRONG, f"correlation {correlation:+.2f}", sign * slopes[:, None])


def _near(values: Values, *, threshold: float, ratio: bool = False, share: str = "most", **_: Any) -> Finding | None:
    """Every row, or most, within the threshold of the baseline: in points, or as a ratio in either direction."""
    others = _others(values)
    base = _mean(values[0]) if others else 0.0
    if not others or (ratio and base <= 0):
        return None
    means = [_mean(values[k]) for k in others]
    if ratio:
        near = sum(1 / threshold <= mean / base <= threshold for mean in means)
    else:
        near = sum(100 * abs(mean - base) <= threshold for mean in means)
    holds = near == len(others) if share == "every" else 2 * near > len(others)
    return Finding(holds, f"{near} of {len(others)} near the baseline")


def _meets(values: Values, *, threshold: float, half: float, **_: Any) -> Finding | None:
    """A ratio is at least the threshold for up to half of the heads, and closer to one for more heads."""
    few, many = [k for k in values if k <= half], [k for k in values if k > half]
    if 0 not in few or not many:
        return None
    means = {k: _mean(values[k]) for k in values}
    holds = all(means[k] >= threshold for k in few) and all(1 / threshold <= means[k] <= threshold for k in many)
    contrast = np.mean([values[k] for k in few], axis=0) - np.mean([values[k] for k in many], axis=0)
    text = f"ratio {np.mean([means[k] for k in few]):.2f} to {np.mean([means[k] for k in many]):.2f}"
    return Finding(holds, text, contrast[~np.isnan(contrast)][:, None])


RELATIONS: dict[str, Callable[..., Finding | None]] = {
    "above": _above,
    "below": lambda values, **settings: _above(values, sign=-1, **settings),
    "gain": _gain,
    "falls": _falls,
    "best": _best,
    "rising": _rising,
    "falling": lambda values, **settings: _rising(values, sign=-1, **settings),
    "near": _near,
    "meets": _meets,
}


def _others(values: Values, rows: str = "all") -> list[int]:
    """Return the rows to compare with the baseline; none if there is no baseline."""
    others = [k for k in values if k > 0] if 0 in values else []
    return others[-1:] if rows == "last" else others


def _mean(numbers: Any) -> float:
    return float(np.nanmean(numbers))


def _differences(values: Values, rows: Sequence[int], sign: int = 1) -> Any:
    """Return the differences from the baseline over the seeds that all of these rows have."""
    differences = np.stack([sign * (values[k] - values[0]) for k in rows], axis=1)
    return differences[~np.isnan(differences).any(axis=1)]


# --- verdicts


@dataclass
class ClaimVerdict:
    claim: Claim
    status: Status
    evidence: list[str]
    seeds: int = 0  # the fewest of its comparisons

    @property
    def words(self) -> str:
        seeds = f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
        return {"not": "not reproduced", "undecided": f"undecided at {seeds}"}.get(self.status, self.status)


def judge_all(grids: Sequence[Grid]) -> list[ClaimVerdict]:
    families = paper.families(grids)
    return [judge(claim, families) for claim in claims()]


def judge(claim: Claim, families: Sequence[Sequence[Grid]]) -> ClaimVerdict:
    objectives = paper.EXPERIMENTS[claim.of]["objectives"]
    own = [family for family in families if family[0].first.objective in objectives]
    verdict = ClaimVerdict(claim, "not run", [])
    statuses: list[Status] = []
    for scope in claim.scopes:
        fitting = [
            [grid for grid in family if _scope(claim, grid) == scope and paper.is_papers(grid)] for family in own
        ]
        # Of several families, such as the stages of one model, the one with the most evidence about the claim.
        judged: list[Judged] = [_judged(claim, scope, family) for family in fitting if family]
        none: Judged = ("not run", 0, ["no runs of the paper's recipe"])
        status, seeds, lines = min(judged, key=_order, default=none)
        statuses.append(status)
        verdict.evidence += [f"{scope}: {line}" for line in lines]
        verdict.seeds = min(verdict.seeds or seeds, seeds) if status != "not run" else verdict.seeds
    verdict.status = _combined(statuses)
    return verdict


def _scope(claim: Claim, grid: Grid) -> str | None:
    return grid.first.data_set if claim.of == "images" else claim.scopes[0]


def _order(judged: Judged) -> int:
    return ("reproduced", "not", "partly", "undecided", "not run").index(judged[0])


def _combined(statuses: Sequence[Status]) -> Status:
    known = {status for status in statuses if status != "not run"}
    if not known:
        return "not run"
    if known == {"reproduced"}:
        return "partly" if "not run" in statuses else "reproduced"
    if known <= {"reproduced", "undecided"}:
        return "undecided"
    return "not" if known <= {"not", "undecided"} else "partly"


def _judged(claim: Claim, scope: str, family: Sequence[Grid]) -> Judged:
    """Judge all parts of the claim on a family, at the claim's numbers of heads."""
    statuses: list[Status] = []
    lines: list[str] = []
    missing: list[str] = []
    seeds: list[int] = []
    for grid, part, where in _settings(claim, scope, family, missing):
        for metric in _expanded(part["metric"], grid):
            values = {k: numbers for k, numbers in values_of(grid, metric).items() if k in claim.heads}
            lacking = [("the baseline" if k == 0 else f"{k}L") + where for k in claim.heads if k not in values]
            half = grid.first.values.get("model.heads", 0) / 2
            finding = RELATIONS[part["relation"]](values, half=half, **part) if values else None
            statuses.append("not run" if finding is None else finding.status())
            missing += lacking if finding else [f"{metric}{where}"]
            if finding is not None:
                seeds += [finding.seeds] if finding.carried_by is not None else []
                means = ", ".join(f"{k}L {_mean(numbers):.4g}" for k, numbers in values.items())
                lines.append(f"{metric}{where}: {finding.text} ({means}); {statuses[-1]}")
    status = _combined(statuses)
    if missing and status == "reproduced":
        status = "partly"
    if status != "not run" and missing:
        lines.append(f"MISSING: {', '.join(dict.fromkeys(missing))}")
    return status, min(seeds, default=0), lines or [f"no {' or '.join(dict.fromkeys(missing)) or 'numbers'} to compare"]


def _settings(
    claim: Claim, scope: str, family: Sequence[Grid], missing: list[str]
) -> Iterator[tuple[Grid, dict[str, Any], str]]:
    """Yield each part with the grid to judge, and a label for its drop path; missing drop paths become notes."""
    measure = str(claim.parts[0]["metric"])
    rates = [str(rate) for rate in DROP_PATHS if rate not in claim.left_out.get(scope, ())]
    kept = [grid for grid in family if paper.drop_path(grid) not in map(str, claim.left_out.get(scope, ()))]
    if claim.drop_paths == "any":  # the drop path at which the most was measured
        plain = measure.split(" / ")[0].split(" @")[0]
        kept = sorted(kept, key=lambda grid: -len(values_of(grid, plain)))[:1] if len(kept) > 1 else kept
    else:
        having = {paper.drop_path(grid) for grid in kept if 0 in values_of(grid, measure)}
        missing += [f"the baseline at drop path {rate}" for rate in rates if rate not in having]
    if claim.drop_paths == "best baseline":
        best = paper.best_baseline(kept, measure)
        kept = [best] if best else kept[:1]
    for grid in kept:
        where = f" at drop path {paper.drop_path(grid)}" if claim.drop_paths != "any" else ""
        for part in claim.parts:
            yield grid, part, where


def _expanded(metric: str, grid: Grid) -> list[str]:
    """Return `snr.snr @0`, `snr.snr @1` ... for `snr.snr @layers`; other metrics unchanged."""
    if not metric.endswith("@layers"):
        return [metric]
    return [metric.replace("@layers", f"@{layer}") for layer in range(int(grid.first.values["model.layers"]))]


def values_of(grid: Grid, metric: str) -> Values:
    """Return the numbers of a metric by seed and number of heads, without plans that differ by layer.

    `average` is the mean of the five tasks, `a / b` a ratio; `a @3` is layer 3, `a @slope`, `@level` and `@deeper` are
    the least-squares slope over all layers, their mean, and the deeper half's.
    """
    if " / " in metric:
        above, below = (values_of(grid, name) for name in metric.split(" / "))
        return {k: above[k] / below[k] for k in above if k in below and below[k].all()}
    name, _, how = metric.partition(" @")
    depth = int(grid.first.values.get("model.layers") or 1)
    layers = [name if layer == depth - 1 else f"{name} [layer {layer}]" for layer in range(depth)]
    names = {"": [name], "slope": layers, "level": layers, "deeper": layers[depth // 2 :]}.get(how)
    if metric == "average":
        names = list(paper.LANGUAGE)
    wide = grid.wide
    places = wide.columns.get_indexer([layers[int(how)]] if names is None else names)
    if (places < 0).any():
        return {}
    numbers = wide.to_numpy()[:, places]
    if how == "slope":
        centred = np.arange(depth) - (depth - 1) / 2
        numbers = numbers @ centred / max((centred**2).sum(), 1)
    else:
        numbers = numbers.mean(axis=1)
    (row_codes, seed_codes), (labels, seeds) = wide.index.codes, wide.index.levels
    values: Values = {}
    for code, label in sorted(enumerate(labels), key=lambda item: (len(item[1]), item[1])):
        own = row_codes == code
        if label.isdecimal() and not np.isnan(numbers[own]).all():
            values[int(label)] = np.full(len(seeds), np.nan)
            values[int(label)][np.asarray(seed_codes)[own]] = numbers[own]
    return values
