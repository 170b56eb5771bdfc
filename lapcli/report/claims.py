"""The paper's claims, read from `claims.yaml`, and their verdicts on our runs: reproduced, partly, not, or not run.

A verdict counts runs of the paper's own recipe alone, and asks for the paper's set of data, heads, drop paths and
layers: what is missing of it makes a claim that holds on the rest "partly", and is listed. What the same rule says of
other runs (smaller models, other data, changed keys) is given beside it as holds, partly or does not hold: evidence,
but no reproduction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lapcli.report import paper, rules, series_rules
from lapcli.report.collect import RunResult
from lapcli.report.compare import DROP_PATH, by_drop_path
from lapcli.report.grouping import HEADS, Grid, group
from lapcli.report.paper import data_set_of, is_papers
from lapcli.report.rules import Case, Finding, Judge, Status

ELSEWHERE = {"reproduced": "holds", "partly": "partly", "not": "does not hold"}


@dataclass(frozen=True)
class _Kind:
    """Whose runs a claim is about, and the paper's set of data and heads for them."""

    objectives: tuple[str, ...]
    scopes: tuple[str, ...]
    heads: tuple[int, ...]


_KINDS = {
    "images": _Kind(("classification",), tuple(paper.CLASSIFICATION), tuple(paper.CLASSIFICATION["ImageNet"])),
    "language": _Kind(("language_model", "chat"), ("language",), tuple(paper.LANGUAGE_AVERAGE)),
    "chat": _Kind(("chat",), ("language",), tuple(paper.LANGUAGE_AVERAGE)),
    "self-supervised": _Kind(("self_supervised",), ("self-supervised",), tuple(paper.SELF_SUPERVISED["linear"])),
}


@dataclass(frozen=True)
class Claim:
    key: str
    text: str
    where: str  # in the paper
    rule: str
    objectives: tuple[str, ...]
    scopes: tuple[str, ...]
    heads: tuple[int, ...]
    judge: Judge
    drop_paths: tuple[str, ...] = ()  # judged together; none: each drop path by itself
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)  # drop paths, by data set
    general: bool = True  # says something of other data and models too


@cache
def claims() -> tuple[Claim, ...]:
    import yaml

    told = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(map(_claim, told))


def _claim(told: dict[str, Any]) -> Claim:
    kind = _KINDS[told.pop("of")]
    ((name, arguments),) = told.pop("judge").items()
    rates = tuple(map(str, told.pop("drop_paths", ())))
    left_out = {scope: tuple(map(str, values)) for scope, values in told.pop("except", {}).items()}
    return Claim(
        objectives=kind.objectives,
        scopes=tuple(told.pop("data", kind.scopes)),
        heads=tuple(told.pop("heads", kind.heads)),
        judge={**rules.RULES, **series_rules.RULES}[name](**arguments),
        drop_paths=rates,
        left_out=left_out,
        **told,
    )


@dataclass
class Verdict:
    claim: Claim
    status: Status
    evidence: list[str]
    elsewhere: list[tuple[str, str, str]] = field(default_factory=list)  # runs, holds or not, evidence


def judge_all(runs: Sequence[RunResult]) -> list[Verdict]:
    """Without the runs of searches, which are no results."""
    results = [run for run in runs if not run.is_search]
    return [judge_claim(claim, results) for claim in claims()]


def judge_claim(claim: Claim, runs: Sequence[RunResult]) -> Verdict:
    cases = _cases(claim, [run for run in runs if run.objective in claim.objectives])
    evidence: list[str] = []
    statuses: list[Status] = []
    for scope in claim.scopes:
        status, lines = _of_scope(
            [(case, claim.judge(case)) for case in cases if case.scope == scope and case.is_papers]
        )
        statuses.append(status)
        evidence += [f"{scope}: {line}" for line in lines]
    verdict = Verdict(claim, _combined(statuses), evidence)
    if claim.general:
        for case in cases:
            finding = claim.judge(case) if not case.is_papers else None
            if finding is not None and finding.status != "not run":
                verdict.elsewhere.append((case.title, ELSEWHERE[finding.status], _in_words(case, finding)))
    return verdict


def _of_scope(found: Sequence[tuple[Case, Finding]]) -> tuple[Status, list[str]]:
    """Of several cases (drop paths that are judged each by itself) one with nothing missing is enough."""
    known = [(case, finding) for case, finding in found if finding.status != "not run"]
    if not known:
        return "not run", [finding.evidence for _, finding in found[:1]] or ["no runs of the paper's recipe"]
    whole = [finding.status for _, finding in known if not finding.missing]
    # What holds on a part of the paper's set takes nothing from what holds on all of it; what fails there does.
    parts = [finding.status for _, finding in known if finding.missing and not (whole and finding.holds)]
    return _combined([*whole, *parts]), [_in_words(case, finding) for case, finding in known]


def _in_words(case: Case, finding: Finding) -> str:
    seeds = sorted({len(row) for grid in case.grids for row in grid.rows.values()})
    number = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}"
    missing = f"; MISSING: {', '.join(finding.missing)}" if finding.missing else ""
    return f"{finding.evidence}; {number}{missing}"


def _combined(statuses: Sequence[Status]) -> Status:
    """Reproduced if all are; "not" if nothing of what was run holds; what was not run makes the rest partly."""
    known = {status for status in statuses if status != "not run"}
    if len(known) != 1:
        return "partly" if known else "not run"
    (status,) = known
    return "partly" if status == "reproduced" and "not run" in statuses else status


def _cases(claim: Claim, runs: Sequence[RunResult]) -> list[Case]:
    by_scope: dict[str, list[RunResult]] = {}
    for run in runs:
        by_scope.setdefault(_scope(run), []).append(run)
    cases = []
    for scope, own in by_scope.items():
        families = by_drop_path(own) if claim.drop_paths else [[grid] for grid in group(own, [HEADS], [])]
        for grids in families:
            ours = [grid for grid in grids if not is_papers(grid.runs[0])]
            papers = [grid for grid in grids if is_papers(grid.runs[0])]
            cases += [case for case in (_case(claim, scope, papers, True), _case(claim, scope, ours, False)) if case]
    return cases


def _case(claim: Claim, scope: str, grids: Sequence[Grid], of_paper: bool) -> Case | None:
    """The grids that the claim is about, with what it asks for if they are the paper's; none if there are none."""
    left_out = claim.left_out.get(scope, ())
    rates = tuple(rate for rate in claim.drop_paths if rate not in left_out)
    kept = [grid for grid in grids if grid.identity.get(DROP_PATH) not in left_out]
    if of_paper and rates:
        kept = [grid for grid in kept if grid.identity.get(DROP_PATH) in rates]
    if not kept:
        return None
    needed = (claim.heads, rates) if of_paper else ((), ())
    return Case(scope, kept[0].title, kept, of_paper, *needed)


def _scope(run: RunResult) -> str:
    if run.objective in ("language_model", "chat"):
        return "language"
    if run.objective == "self_supervised":
        return "self-supervised"
    return data_set_of(run) or "other images"
