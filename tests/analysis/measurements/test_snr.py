"""Mean-to-spread ratio against loops over tokens."""

import numpy as np
import pytest
import torch

from lapcli.analysis.measurements.snr import SignalToNoiseAccumulator


def measured(x, batch=100):
    accumulator = SignalToNoiseAccumulator()
    for part in torch.from_numpy(x).split(batch):
        accumulator.update(part)
    return accumulator.result()


@pytest.mark.parametrize("batch", [1, 3])
def test_ratio_of_mean_and_spread(batch):
    x = np.random.default_rng(1).normal(size=(4, 6, 3)) + 2
    ratios = []
    for s in x:
        mean = s.mean(axis=0)
        ratios.append(np.linalg.norm(mean) / np.sqrt(np.mean([np.sum((t - mean) ** 2) for t in s])))
    found = measured(x, batch).values
    assert found["snr"] == pytest.approx(np.mean(ratios), rel=1e-12)


def test_ratio_by_hand():
    """Tokens (3, 1) and (3, -1): the mean has length 3, the spread is 1."""
    assert measured(np.array([[[3.0, 1.0], [3.0, -1.0]]])).values["snr"] == pytest.approx(3)


def test_ratio_of_equal_tokens_is_left_out():
    equal = np.full((1, 5, 2), 0.1)
    found = measured(equal)
    assert found.values["snr"] is None
    assert "left out" in found.notes[0]
    both = np.concatenate([equal[:, :2], np.array([[[3.0, 1.0], [3.0, -1.0]]])])
    assert measured(both).values["snr"] == pytest.approx(3)
