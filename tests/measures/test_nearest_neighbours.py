"""k-NN against scikit-learn's and against a dense computation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier

from lapcli.measures import nearest_neighbours
from lapcli.measures.nearest_neighbours import classify, nearest

TEMPERATURE = 0.07


@pytest.fixture
def clusters():
    """Features of five overlapping classes, in no order."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(5, 16))
    labels = generator.integers(5, size=700)
    features = centres[labels] + 1.5 * generator.normal(size=(700, 16))
    return features.astype(np.float32), labels


@pytest.mark.parametrize("k", [1, 20])
def test_the_classes_are_scikit_learns(clusters, k, monkeypatch):
    """scikit-learn's own neighbours by cosine distance, with the votes weighed by exp(similarity / 0.07)."""
    monkeypatch.setattr(nearest_neighbours, "KEYS_AT_ONCE", 64)
    monkeypatch.setattr(nearest_neighbours, "QUERIES_AT_ONCE", 33)
    features, labels = clusters
    oracle = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / TEMPERATURE)
    ).fit(features[:500].astype(np.float64), labels[:500])
    expected = oracle.predict(features[500:].astype(np.float64))
    keys, queries = F.normalize(torch.from_numpy(features[:500]), dim=1), torch.from_numpy(features[500:])
    found = classify(queries, keys, torch.from_numpy(labels[:500]), 5, sorted({k, 200}), TEMPERATURE)
    assert (found[k].numpy() == expected).all()
    assert 0.3 < (expected == labels[500:]).mean() < 0.999  # neither hopeless nor trivial


def test_neighbours_are_the_dense_ones_whatever_the_chunks(clusters, monkeypatch):
    features = torch.from_numpy(clusters[0])
    queries, keys = features[600:], features[:600]
    order = torch.argsort(queries.double() @ keys.double().T, dim=1, descending=True)[:, :20]
    for size in (13, 600, 5):  # 5: fewer keys at once than neighbours are wanted
        monkeypatch.setattr(nearest_neighbours, "KEYS_AT_ONCE", size)
        similarity, index = nearest(queries, keys, 20)
        assert torch.equal(index, order)
        assert torch.allclose(similarity, (queries @ keys.T).gather(1, order), atol=1e-4)
