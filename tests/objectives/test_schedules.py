"""Schedules, worked by hand for the paper's 21,400 steps."""

import pytest

from lapcli.objectives.schedules import learning_rate_multiplier, muon_momentum
from lapcli.recipe.optimizers import MuonSection
from lapcli.recipe.schema import PlateauSchedule

N = 21_400


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [
        (0, 1.0),
        (17_119, 1.0),
        (17_120, 1.0),  # N - W, the last of the plateau
        (17_121, 4279 / 4280),
        (19_260, 0.5),
        (21_399, 1 / 4280),  # the last update
    ],
)
def test_plateau_then_down_to_nothing(step: int, multiplier: float) -> None:
    assert learning_rate_multiplier(PlateauSchedule(), step, N) == pytest.approx(multiplier, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (60, 1.0), (61, 0.9 * 39 / 40 + 0.1), (80, 0.55), (99, 0.9 / 40 + 0.1)],
)
def test_warmup_and_a_final_rate(step: int, multiplier: float) -> None:
    schedule = PlateauSchedule(warmup=0.1, warmdown=0.4, final=0.1)
    assert learning_rate_multiplier(schedule, step, 100) == pytest.approx(multiplier, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "momentum"),
    [(0, 0.85), (1, 0.85 + 0.1 / 300), (150, 0.90), (299, 0.95 - 0.1 / 300), (300, 0.95), (N, 0.95)],
)
def test_momentum_of_muon(step: int, momentum: float) -> None:
    assert muon_momentum(MuonSection(), step) == pytest.approx(momentum, rel=1e-12)
