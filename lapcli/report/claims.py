"""The paper's claims, read from `claims.yaml`, and their verdicts on our runs: reproduced, partly, not, or not run.

A verdict counts only runs of the paper's own recipe, and requires the paper's set of data, heads, drop paths and
layers: if a part is missing it is listed, and a claim that holds on the rest is "partly" reproduced. The judgement of
the same rule on other runs (smaller models, other data, changed keys) is given beside it as holds, partly or does not
hold: evidence, but not a reproduction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lapcli.report.collect import RunResult
from lapcli.report.grouping import HEADS, RunGrid, group
from lapcli.report.paper import EXPERIMENTS, PaperExperiment, is_papers
from lapcli.report.paper_tables import DROP_PATH, by_drop_path
from lapcli.report.rules import RULES, Case, Judge, Judgement, Status

ELSEWHERE = {"reproduced": "holds", "partly": "partly", "not": "does not hold"}


@dataclass(frozen=True)
class Claim:
    key: str
    text: str
    where: str  # in the paper
    rule: str
    experiment: PaperExperiment
    scopes: tuple[str, ...]  # those of the experiment's that the claim is about
    heads: tuple[int, ...]
    judge: Judge
    drop_paths: tuple[str, ...] = ()  # judged together; empty: each drop path separately
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)  # drop paths, by data set
    general: bool = True  # also judged on other data and models


@cache
def claims() -> tuple[Claim, ...]:

    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(map(_claim, entries))


def _claim(entry: dict[str, Any]) -> Claim:
    experiment = EXPERIMENTS[entry.pop("of")]
    ((name, arguments),) = entry.pop("judge").items()
    rates = tuple(map(str, entry.pop("drop_paths", ())))
    left_out = {scope: tuple(map(str, values)) for scope, values in entry.pop("except", {}).items()}
    return Claim(
        experiment=experiment,
        scopes=tuple(entry.pop("data", experiment.scopes)),
        heads=tuple(entry.pop("heads", experiment.heads)),
        judge=RULES[name](**arguments),
        drop_paths=rates,
        left_out=left_out,
        # Last: arguments are evaluated in order, and the keys popped above must be gone.
        **entry,
    )


@dataclass
class ClaimVerdict:
    claim: Claim
    status: Status
    evidence: list[str]
    elsewhere: list[tuple[str, str, str]] = field(default_factory=list)  # runs, holds or not, evidence


def judge_all(runs: Sequence[RunResult]) -> list[ClaimVerdict]:
    """Return the verdicts on all claims; runs of searches are not results and do not count."""
    results = [run for run in runs if not run.is_search]
    return [judge_claim(claim, results) for claim in claims()]


def judge_claim(claim: Claim, runs: Sequence[RunResult]) -> ClaimVerdict:
    cases = _cases(claim, [run for run in runs if run.objective in claim.experiment.objectives])
    evidence: list[str] = []
    statuses: list[Status] = []
    for scope in claim.scopes:
        status, lines = _judge_scope(
            [(case, claim.judge(case)) for case in cases if case.scope == scope and case.is_papers]
        )
        statuses.append(status)
        evidence += [f"{scope}: {line}" for line in lines]
    verdict = ClaimVerdict(claim, _combined(statuses), evidence)
    if claim.general:
        for case in cases:
            judgement = claim.judge(case) if not case.is_papers else None
            if judgement is not None and judgement.status != "not run":
                verdict.elsewhere.append((case.title, ELSEWHERE[judgement.status], _in_words(case, judgement)))
    return verdict


def _judge_scope(cases: Sequence[tuple[Case, Judgement]]) -> tuple[Status, list[str]]:
    """Judge a scope. If drop paths are judged separately, one case with nothing missing is enough."""
    known = [(case, judgement) for case, judgement in cases if judgement.status != "not run"]
    if not known:
        return "not run", [judgement.evidence for _, judgement in cases[:1]] or ["no runs of the paper's recipe"]
    whole = [judgement.status for _, judgement in known if not judgement.missing]
    # A claim that holds on a whole set is not weakened by one that holds on a part; it is by one that fails there.
    parts = [judgement.status for _, judgement in known if judgement.missing and not (whole and judgement.holds)]
    return _combined([*whole, *parts]), [_in_words(case, judgement) for case, judgement in known]


def _in_words(case: Case, judgement: Judgement) -> str:
    seeds = sorted({len(row) for grid in case.grids for row in grid.rows.values()})
    number = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}"
    missing = f"; MISSING: {', '.join(judgement.missing)}" if judgement.missing else ""
    return f"{judgement.evidence}; {number}{missing}"


def _combined(statuses: Sequence[Status]) -> Status:
    """Combine statuses: reproduced if all are, "not" if nothing that was run holds, else partly."""
    known = {status for status in statuses if status != "not run"}
    if len(known) != 1:
        return "partly" if known else "not run"
    (status,) = known
    return "partly" if status == "reproduced" and "not run" in statuses else status


def _cases(claim: Claim, runs: Sequence[RunResult]) -> list[Case]:
    by_scope: dict[str, list[RunResult]] = {}
    for run in runs:
        by_scope.setdefault(claim.experiment.scope_of(run), []).append(run)
    cases = []
    for scope, in_scope in by_scope.items():
        families = by_drop_path(in_scope) if claim.drop_paths else [[grid] for grid in group(in_scope, [HEADS], [])]
        for grids in families:
            # One run stands for its grid: the others agree with it in every key that `is_papers` compares.
            ours = [grid for grid in grids if not is_papers(grid.runs[0])]
            papers = [grid for grid in grids if is_papers(grid.runs[0])]
            cases += [case for case in (_case(claim, scope, papers, True), _case(claim, scope, ours, False)) if case]
    return cases


def _case(claim: Claim, scope: str, grids: Sequence[RunGrid], of_paper: bool) -> Case | None:
    """Select the grids that the claim is about, with its requirements if they are the paper's; None if there are
    none."""
    left_out = claim.left_out.get(scope, ())
    rates = tuple(rate for rate in claim.drop_paths if rate not in left_out)
    kept = [grid for grid in grids if grid.identity.get(DROP_PATH) not in left_out]
    if of_paper and rates:
        kept = [grid for grid in kept if grid.identity.get(DROP_PATH) in rates]
    if not kept:
        return None
    needed = (claim.heads, rates) if of_paper else ((), ())
    return Case(scope, kept[0].title, kept, of_paper, *needed)
