"""Cosine similarity against all pairs of tokens."""

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity as pairwise

from lapcli.analysis.measurements.cossim import CosineSimilarityAccumulator


def measured(x, batch=100):
    accumulator = CosineSimilarityAccumulator()
    for part in torch.from_numpy(x).split(batch):
        accumulator.update(part)
    return accumulator.result()


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_cosine_similarity_is_the_mean_over_pairs(batch):
    x = np.random.default_rng(0).normal(size=(5, 6, 4)) + 0.5
    expected = [(pairwise(s).sum() - len(s)) / (len(s) * (len(s) - 1)) for s in x]
    found = measured(x, batch).values
    assert found["cosine_similarity"] == pytest.approx(np.mean(expected), rel=1e-12)
    assert found["cosine_similarity_std"] == pytest.approx(np.std(expected), rel=1e-9)


def test_cosine_similarity_by_hand():
    """Three tokens, two of them equal and one across: pairs 1, 0, 0."""
    x = np.array([[[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]]])
    assert measured(x).values["cosine_similarity"] == pytest.approx(1 / 3)


def test_cosine_similarity_of_degenerate_input():
    alone = measured(np.ones((2, 1, 3)))
    assert alone.values["cosine_similarity"] is None
    assert "no pairs" in alone.notes[0]
    x = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    zero = measured(x)
    assert zero.values["cosine_similarity"] == pytest.approx(1 / 3)  # one pair of three is parallel
    assert measured(np.full((1, 4, 3), 0.1)).values["cosine_similarity"] == pytest.approx(1)
