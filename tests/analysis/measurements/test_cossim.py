"""Cosine similarity against all pairs of tokens."""

import numpy as np
import pytest
import torch
from analysis_support import of_tokens
from sklearn.metrics.pairwise import cosine_similarity as pairwise

from lapcli.analysis.measurements.similarity import CosineSimilarity


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_cosine_similarity_is_the_mean_over_pairs(batch):
    x = np.random.default_rng(0).normal(size=(5, 6, 4)) + 0.5
    expected = [(pairwise(s).sum() - len(s)) / (len(s) * (len(s) - 1)) for s in x]
    found = of_tokens(CosineSimilarity, torch.from_numpy(x).split(batch)).values
    assert found["cosine_similarity"] == pytest.approx(np.mean(expected), rel=1e-12)


def test_cosine_similarity_by_hand():
    """Three tokens, two of them equal and one orthogonal: pairs 1, 0, 0."""
    x = torch.tensor([[[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]]])
    assert of_tokens(CosineSimilarity, [x]).values["cosine_similarity"] == pytest.approx(1 / 3)
    assert of_tokens(CosineSimilarity, [x[:, :1]]).values["cosine_similarity"] is None  # no pairs
