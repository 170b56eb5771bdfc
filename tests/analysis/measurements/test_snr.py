"""Mean-to-spread ratio against loops over tokens."""

import numpy as np
import pytest
import torch
from analysis_support import of_tokens

from lapcli.analysis.measurements.similarity import SignalToNoise


def test_ratio_of_mean_to_spread():
    x = np.random.default_rng(1).normal(size=(4, 6, 3)) + 2
    ratios = []
    for s in x:
        mean = s.mean(axis=0)
        ratios.append(np.linalg.norm(mean) / np.sqrt(np.mean([np.sum((t - mean) ** 2) for t in s])))
    found = of_tokens(SignalToNoise, torch.from_numpy(x).split(3)).values
    assert found["snr"] == pytest.approx(np.mean(ratios), rel=1e-12)
