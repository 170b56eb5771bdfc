"""The paper's claims, each with the rule that decides it on our runs: reproduced, partly, not, or not run.

A verdict counts runs of the paper's own recipe alone. What the same rule says of other runs (smaller models, other
data, changed keys) is given beside it as holds, partly or does not hold: evidence, but no reproduction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lapcli.report.collect import RunResult
from lapcli.report.compare import by_drop_path
from lapcli.report.grouping import HEADS, group
from lapcli.report.paper import data_set_of, is_papers
from lapcli.report.rules import (
    IMAGES,
    Case,
    Judge,
    Status,
    above_baseline,
    below_baseline,
    best_rows,
    falls_by,
    gain,
    nearer_collapse,
    papers_exception,
    rising,
    shares_meet,
    spectrum,
)

ELSEWHERE = {"reproduced": "holds", "partly": "partly", "not": "does not hold"}


@dataclass(frozen=True)
class Claim:
    key: str
    text: str
    where: str  # in the paper
    rule: str
    scopes: tuple[str, ...]
    judge: Judge
    objectives: tuple[str, ...]
    general: bool = True  # says something of other data and models too
    families: bool = False  # over all drop paths of a recipe


@dataclass
class Verdict:
    claim: Claim
    status: Status
    evidence: list[str]
    elsewhere: list[tuple[str, str, str]] = field(default_factory=list)  # runs, holds or not, evidence


def judge_all(runs: Sequence[RunResult]) -> list[Verdict]:
    """Without the runs of searches, which are no results."""
    results = [run for run in runs if not run.is_search]
    return [judge_claim(claim, results) for claim in CLAIMS]


def judge_claim(claim: Claim, runs: Sequence[RunResult]) -> Verdict:
    cases = _cases(claim, [run for run in runs if run.objective in claim.objectives])
    evidence: list[str] = []
    statuses: list[Status] = []
    for scope in claim.scopes:
        own = [claim.judge(case) for case in cases if case.scope == scope and case.is_papers]
        known = [finding for finding in own if finding.status != "not run"]
        if not known:
            reasons = [finding.evidence for finding in own] or ["no runs of the paper's recipe"]
            evidence.append(f"{scope}: {reasons[0]}")
            statuses.append("not run")
            continue
        evidence += [f"{scope}: {finding.evidence}" for finding in known]
        statuses.append(_combined([finding.status for finding in known]))
    verdict = Verdict(claim, _combined(statuses), evidence)
    if claim.general:
        for case in cases:
            finding = claim.judge(case) if not case.is_papers else None
            if finding is not None and finding.status != "not run":
                verdict.elsewhere.append((case.title, ELSEWHERE[finding.status], finding.evidence))
    return verdict


def _combined(statuses: Sequence[Status]) -> Status:
    """All alike, or partly: a claim on three data sets is not reproduced by one."""
    return statuses[0] if len(set(statuses)) == 1 else "partly"


def _cases(claim: Claim, runs: Sequence[RunResult]) -> list[Case]:
    by_scope: dict[str, list[RunResult]] = {}
    for run in runs:
        by_scope.setdefault(_scope(run), []).append(run)
    cases = []
    for scope, own in by_scope.items():
        if claim.families:
            grouped = by_drop_path(own)
        else:
            grouped = [[grid] for grid in group(own, [HEADS], [])]
        for grids in grouped:
            cases.append(Case(scope, grids[0].title, grids, all(is_papers(grid.runs[0]) for grid in grids)))
    return cases


def _scope(run: RunResult) -> str:
    if run.objective in ("language_model", "chat"):
        return "language"
    if run.objective == "self_supervised":
        return "self-supervised"
    return data_set_of(run) or "other images"


_VISION, _TEXT, _CHAT, _SSL = ("classification",), ("language_model", "chat"), ("chat",), ("self_supervised",)
_RISES = "Spearman correlation with k at least 0.8 (partly: above 0)"
_GAIN = "at least three quarters of it (partly: any gain)"
_K_IMAGES, _K_TEXT = (0, 3, 6, 9, 11, 12), (0, 1, 3, 5, 7, 9, 10)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "imagenet-gain",
        "More than 1% better than the baseline on ImageNet",
        "3.1",
        "the best k gains more than 1 point at the drop path with the best baseline (partly: any gain)",
        ("ImageNet",),
        gain("top1", 1.0, exactly=True),
        _VISION,
        general=False,
        families=True,
    ),
    Claim(
        "cifar100-gain",
        "Almost 2% better than the baseline on CIFAR-100",
        "3.1",
        f"the best k gains 2 points, {_GAIN}",
        ("CIFAR100",),
        gain("top1", 2.0),
        _VISION,
        general=False,
        families=True,
    ),
    Claim(
        "imagenet-12L",
        "12 Laplacian heads gain 0.87 on ImageNet at the best drop path of the baseline",
        "3.1, Table 1",
        f"12L gains 0.87 points, {_GAIN}",
        ("ImageNet",),
        gain("top1", 0.87, 12, best=False),
        _VISION,
        general=False,
        families=True,
    ),
    Claim(
        "every-drop-path",
        "Every k is above the baseline, on every data set and at every drop path",
        "3.1, accuracy figure",
        "each mean top-1 above the baseline's of the same drop path (partly: some)",
        IMAGES,
        above_baseline("top1", _K_IMAGES),
        _VISION,
        families=True,
    ),
    Claim(
        "monotone",
        "Accuracy rises nearly monotonically with k, but for ImageNet at drop path 0.4",
        "3.1, accuracy figure",
        f"top-1 at each drop path: {_RISES}",
        IMAGES,
        rising(("top1", 1), skip=papers_exception),
        _VISION,
        families=True,
    ),
    Claim(
        "arc-easy",
        "ARC-Easy +16, with 5 Laplacian heads the best",
        "3.2, Table 2",
        f"5L is the best and gains 16 points, {_GAIN}",
        ("language",),
        gain("arc_easy", 16, 5),
        _CHAT,
        general=False,
    ),
    Claim(
        "arc-challenge",
        "ARC-Challenge +7, with 5 Laplacian heads the best",
        "3.2, Table 2",
        f"5L is the best and gains 7 points, {_GAIN}",
        ("language",),
        gain("arc_challenge", 7, 5),
        _CHAT,
        general=False,
    ),
    Claim(
        "gsm8k",
        "GSM8K +1.7, with 3 Laplacian heads the best",
        "3.2, Table 2",
        f"3L is the best and gains 1.7 points, {_GAIN}",
        ("language",),
        gain("gsm8k", 1.7, 3),
        _CHAT,
        general=False,
    ),
    Claim(
        "mmlu",
        "MMLU: every k is above the baseline",
        "3.2, Table 2",
        "each mean above the baseline's (partly: some)",
        ("language",),
        above_baseline("mmlu", _K_TEXT),
        _CHAT,
    ),
    Claim(
        "average",
        "The average over the five tasks is above the baseline's for every k",
        "3.2, Table 2",
        "each mean above the baseline's (partly: some)",
        ("language",),
        above_baseline("average", _K_TEXT),
        _CHAT,
    ),
    Claim(
        "best-averages",
        "5 and 9 Laplacian heads have the best averages",
        "3.2",
        "the two best averages are those of 5L and 9L (partly: one of them)",
        ("language",),
        best_rows("average", {5, 9}),
        _CHAT,
        general=False,
    ),
    Claim(
        "dino-linear",
        "3 and 5 Laplacian heads are best in the linear probe",
        "3.3, Table 3",
        "the two best are 3L and 5L (partly: one of them)",
        ("self-supervised",),
        best_rows("linear", {3, 5}),
        _SSL,
        general=False,
    ),
    Claim(
        "dino-miou",
        "5 Laplacian heads are best in mIoU, and 6 are below the baseline",
        "3.3, Table 3",
        "5L is the best and 6L below 0L (partly: one of the two)",
        ("self-supervised",),
        best_rows("ade20k", {5}, below=6),
        _SSL,
        general=False,
    ),
    Claim(
        "variance-shift",
        "The within-sequence share of the variance falls and the between-class share rises with k",
        "4.1, ANOVA figure",
        f"both shares in the last layer: {_RISES}, with the sign",
        IMAGES,
        rising(("anova.within_sequence_share", -1), ("anova.between_class_share", 1)),
        _VISION,
    ),
    Claim(
        "shares-meet",
        "The within-class share is well above the between-class share for k = 0, 3, 6, and nearly equal later",
        "4.1",
        "within/between at least 1.5 up to half of the heads, within 2/3 to 1.5 above (partly: the ratio nears 1)",
        IMAGES,
        shares_meet,
        _VISION,
    ),
    Claim(
        "cossim",
        "Cosine similarity of tokens rises with k",
        "4.1, CosSim figure",
        f"in the last layer: {_RISES}",
        IMAGES,
        rising(("cossim.cosine_similarity", 1)),
        _VISION,
    ),
    Claim(
        "snr",
        "The mean-to-spread ratio after the norm before the MLP rises with k",
        "appendix C",
        f"in the last layer: {_RISES}",
        ("ImageNet",),
        rising(("snr.snr", 1)),
        _VISION,
    ),
    Claim(
        "neural-collapse",
        "Class means and classifier come nearer to neural collapse (NC2 to NC4)",
        "4.1, appendix D",
        "each measure smaller at the largest k than without (partly: some)",
        IMAGES,
        nearer_collapse,
        _VISION,
    ),
    Claim(
        "k99",
        "k_0.99 of language models falls by 21% (547.7 to 430.4) when all heads are Laplacian",
        "4.2",
        "falls by at least three quarters of 21% (partly: falls)",
        ("language",),
        falls_by("spectrum.k_0.99", 0.21),
        _TEXT,
    ),
    Claim(
        "k99-grows",
        "... and the more Laplacian heads, the more",
        "4.2",
        f"k_0.99: {_RISES}, falling",
        ("language",),
        rising(("spectrum.k_0.99", -1)),
        _TEXT,
    ),
    Claim(
        "language-spectrum",
        "Language spectra: leading eigenvalues as the baseline's, tail smaller",
        "4.2",
        "leading hundredth within 0.8 to 1.25 of the baseline's, second half smaller, for every k (partly: some k)",
        ("language",),
        spectrum("language"),
        _TEXT,
    ),
    Claim(
        "language-anova",
        "Language: the between-class share of the variance rises with k",
        "4.2, ANOVA figure",
        f"last layer: {_RISES}",
        ("language",),
        rising(("anova.between_class_share", 1)),
        _TEXT,
    ),
    Claim(
        "dino-spectrum",
        "Self-supervised spectra: larger leading eigenvalues and a steeper tail",
        "4.3",
        "leading hundredth larger than the baseline's, and the second half grows less than it, for every k "
        "(partly: some k)",
        ("self-supervised",),
        spectrum("self-supervised"),
        _SSL,
    ),
    Claim(
        "dino-k99",
        "Self-supervised: fewer components for 99% of the variance with Laplacian heads",
        "4.3",
        "k_0.99 of every k below the baseline's (partly: some)",
        ("self-supervised",),
        below_baseline("spectrum.k_0.99"),
        _SSL,
    ),
)
