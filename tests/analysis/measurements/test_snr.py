"""Mean-to-spread ratio against loops over tokens."""

import numpy as np
import pytest
import torch
from analysis_support import of_tokens

from lapcli.analysis.measurements.snr import SignalToNoise


@pytest.mark.parametrize("batch", [1, 3])
def test_ratio_of_mean_and_spread(batch):
    x = np.random.default_rng(1).normal(size=(4, 6, 3)) + 2
    ratios = []
    for s in x:
        mean = s.mean(axis=0)
        ratios.append(np.linalg.norm(mean) / np.sqrt(np.mean([np.sum((t - mean) ** 2) for t in s])))
    found = of_tokens(SignalToNoise, torch.from_numpy(x).split(batch)).values
    assert found["snr"] == pytest.approx(np.mean(ratios), rel=1e-12)


def test_ratio_of_equal_tokens_is_left_out():
    """Of tokens (3, 1) and (3, -1) the mean has length 3, the spread is 1."""
    equal, varied = torch.full((1, 2, 2), 0.1), torch.tensor([[[3.0, 1.0], [3.0, -1.0]]])
    assert of_tokens(SignalToNoise, [equal]).values["snr"] is None
    assert of_tokens(SignalToNoise, [equal, varied]).values["snr"] == pytest.approx(3)
