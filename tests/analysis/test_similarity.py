"""Cosine similarity and mean-to-spread ratio against loops over pairs and tokens."""

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity as pairwise

from lapcli.analysis.cosine import CosineSimilarity
from lapcli.analysis.snr import SignalToNoise


def measured(accumulator, x, batch=100):
    for part in torch.from_numpy(x).split(batch):
        accumulator.update(part)
    return accumulator.result()


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_cosine_similarity_is_the_mean_over_pairs(batch):
    x = np.random.default_rng(0).normal(size=(5, 6, 4)) + 0.5
    expected = [(pairwise(s).sum() - len(s)) / (len(s) * (len(s) - 1)) for s in x]
    found = measured(CosineSimilarity(), x, batch).values
    assert found["cosine_similarity"] == pytest.approx(np.mean(expected), rel=1e-12)
    assert found["cosine_similarity_std"] == pytest.approx(np.std(expected), rel=1e-9)


def test_cosine_similarity_by_hand():
    """Three tokens, two of them equal and one across: pairs 1, 0, 0."""
    x = np.array([[[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]]])
    assert measured(CosineSimilarity(), x).values["cosine_similarity"] == pytest.approx(1 / 3)


def test_cosine_similarity_of_degenerate_input():
    alone = measured(CosineSimilarity(), np.ones((2, 1, 3)))
    assert alone.values["cosine_similarity"] is None
    assert "no pairs" in alone.notes[0]
    x = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    zero = measured(CosineSimilarity(), x)
    assert zero.values["cosine_similarity"] == pytest.approx(1 / 3)  # one pair of three is parallel
    assert "1 tokens are zero" in zero.notes[0]
    assert measured(CosineSimilarity(), np.full((1, 4, 3), 0.1)).values["cosine_similarity"] == pytest.approx(1)


@pytest.mark.parametrize("batch", [1, 3])
def test_ratio_of_mean_and_spread(batch):
    x = np.random.default_rng(1).normal(size=(4, 6, 3)) + 2
    ratios = []
    for s in x:
        mean = s.mean(axis=0)
        ratios.append(np.linalg.norm(mean) / np.sqrt(np.mean([np.sum((t - mean) ** 2) for t in s])))
    found = measured(SignalToNoise(), x, batch).values
    assert found["snr"] == pytest.approx(np.mean(ratios), rel=1e-12)


def test_ratio_by_hand():
    """Tokens (3, 1) and (3, -1): the mean has length 3, the spread is 1."""
    assert measured(SignalToNoise(), np.array([[[3.0, 1.0], [3.0, -1.0]]])).values["snr"] == pytest.approx(3)


def test_ratio_of_equal_tokens_is_left_out():
    equal = np.full((1, 5, 2), 0.1)
    found = measured(SignalToNoise(), equal)
    assert found.values["snr"] is None
    assert "left out" in found.notes[0]
    both = np.concatenate([equal[:, :2], np.array([[[3.0, 1.0], [3.0, -1.0]]])])
    assert measured(SignalToNoise(), both).values["snr"] == pytest.approx(3)
