"""Ladders with a known truth, without training: how often is the referee right?

Losses follow a power law in compute, as marin measured it; pairs differ by the truth and by noise whose deviations are
those of the earlier study: 0.0037 bits per byte for Laplacian heads, 0.0027 for exclusive ones, 0.0007 for a learned
mix. The seed's own noise is shared by the two runs of a pair.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lapcli.experiments.referee import Rung, judge, planned_power

#: FLOPs and pairs of the rungs d4 to d10, and the held-out d12.
COMPUTES = {"d4": 1.1e16, "d6": 4.7e16, "d8": 1.5e17, "d10": 4.2e17, "d12": 1.0e18}
PAIRS = {"d4": 5, "d6": 5, "d8": 4, "d10": 3, "d12": 2}
SEED_NOISE = 0.004  # of the losses of one arm, between seeds
DEVIATIONS = {"laplacian": 0.0037, "exclusive": 0.0027, "mix": 0.0007, "A/A": SEED_NOISE * math.sqrt(2)}
MARGIN = 0.003
LADDERS = 400

Truth = Callable[[float], float]  # from compute to the true difference


@dataclass(frozen=True)
class Check:
    """One property of the referee, with its measured and allowed values."""

    name: str
    found: float
    low: float
    high: float

    @property
    def is_met(self) -> bool:
        return self.low <= self.found <= self.high


def baseline_loss(compute: float) -> float:
    return 0.55 + 0.42 * (compute / 1e17) ** -0.0941


def draw_arms(
    draws: np.random.Generator, truths: Mapping[str, Truth], pairs: Mapping[str, int] = PAIRS
) -> dict[str, list[Rung]]:
    """Draw a ladder whose arms share the baseline's runs."""
    arms: dict[str, list[Rung]] = {name: [] for name in truths}
    for rung, count in pairs.items():
        compute = COMPUTES[rung]
        baseline = baseline_loss(compute) + SEED_NOISE * draws.standard_normal(count)
        for name, truth in truths.items():
            differences = truth(compute) + DEVIATIONS.get(name, 0.0037) * draws.standard_normal(count)
            arms[name].append(Rung(rung, compute, baseline, baseline + differences))
    return arms


def nothing(compute: float) -> float:
    return 0.0


def trend(at_d10: float, per_decade: float) -> Truth:
    return lambda compute: at_d10 + per_decade * math.log10(compute / COMPUTES["d10"])


def true_multiplier(compute: float, difference: float) -> float:
    """Invert the power law."""
    wanted = baseline_loss(compute) + difference
    return 1e17 * ((wanted - 0.55) / 0.42) ** (-1 / 0.0941) / compute


def validate(ladders: int = LADDERS, seed: int = 0) -> list[Check]:
    """Simulate ladders of each kind and compare the verdicts and intervals with the truth."""
    draws = [np.random.default_rng(seed + number) for number in range(4)]
    fitted = {name: count for name, count in PAIRS.items() if name != "d12"}

    # Three arms without an effect, and one whose effect equals the margin, which is not "no effect".
    claims = equivalences = 0
    for _ in range(ladders):
        null = judge(draw_arms(draws[0], dict.fromkeys(DEVIATIONS, nothing)), MARGIN, held_out="d12", multipliers=False)
        claims += any(null[name].verdict in ("helps", "hurts") for name in null if name != "A/A")
        edge = judge(draw_arms(draws[0], {"laplacian": lambda compute: MARGIN}), MARGIN, multipliers=False)
        equivalences += edge["laplacian"].verdict == "no effect"

    # An arm with the effect that the plan detects in 80%, and two arms without an effect.
    effect = planned_power(DEVIATIONS["laplacian"], fitted, COMPUTES, arms=len(DEVIATIONS))
    truths: dict[str, Truth] = {**dict.fromkeys(DEVIATIONS, nothing), "laplacian": lambda compute: -effect}
    detected = 0
    for _ in range(ladders):
        findings = judge(draw_arms(draws[1], truths), MARGIN, held_out="d12", multipliers=False)
        detected += findings["laplacian"].verdict == "helps"

    # Do the intervals contain the truth?
    hits: dict[str, list[bool]] = {"difference": [], "multiplier": [], "held-out": []}
    for _ in range(ladders):
        truth = trend(draws[2].normal(0, 0.006), draws[2].normal(0, 0.003))
        finding = judge(draw_arms(draws[2], {"laplacian": truth}), MARGIN, held_out="d12")["laplacian"]
        for rung in finding.rungs:
            hits["difference"].append(truth(rung.compute) in rung.difference)
            if rung.multiplier is not None:
                hits["multiplier"].append(true_multiplier(rung.compute, truth(rung.compute)) in rung.multiplier)
        hits["held-out"].append(finding.held_out is not None and finding.held_out.is_inside)
    inside = {name: sum(each) / len(each) for name, each in hits.items()}

    # Decisions at the largest rung, compared with a ranking by one mean there that spends all of the compute. A
    # ranking always decides. The ladder decides less often, so its decisions should be right more often; and its
    # estimates should have the correct sign as often.
    alone = {"d10": round(sum(count * COMPUTES[name] for name, count in fitted.items()) / COMPUTES["d10"])}
    decided = right = signs = ranked = 0
    for _ in range(ladders):
        truth = trend(draws[3].normal(0, 0.004), draws[3].normal(0, 0.002))
        true = truth(COMPUTES["d10"])
        finding = judge(draw_arms(draws[3], {"laplacian": truth}, fitted), MARGIN, multipliers=False)["laplacian"]
        (single,) = draw_arms(draws[3], {"laplacian": truth}, alone)["laplacian"]
        decided += finding.verdict in ("helps", "hurts")
        right += finding.verdict == ("helps" if true < 0 else "hurts")
        signs += finding.difference.value * true > 0
        ranked += float(single.differences.mean()) * true > 0

    return [
        Check("ladders of three arms without effects that claim one", claims / ladders, 0, 0.05),
        Check("effects as large as the margin judged as no effect", equivalences / ladders, 0, 0.07),
        Check("effects detected where the plan predicts 80%", detected / ladders, 0.75, 0.85),
        Check("95% intervals of a difference that contain the truth", inside["difference"], 0.93, 0.97),
        Check("95% intervals of a multiplier that contain the truth", inside["multiplier"], 0.93, 0.97),
        Check("prediction intervals that contain the held-out rung", inside["held-out"], 0.90, 0.98),
        Check("correct decisions of the ladder, minus those of a ranking", right / decided - ranked / ladders, 0, 1),
        Check("correct signs of the ladder, minus those of a ranking", (signs - ranked) / ladders, -0.02, 1),
    ]
