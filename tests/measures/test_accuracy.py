"""Accuracy over every image, and its interval; k-NN against scikit-learn's and against a dense computation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_support import image_recipe
from scipy.stats import binomtest
from sklearn.neighbors import KNeighborsClassifier

from lapcli.data.images.sources import open_images
from lapcli.evaluation.tasks import wilson_interval
from lapcli.measures import accuracy
from lapcli.measures.accuracy import classify, measure_accuracy, nearest
from lapcli.runtime.errors import LapError
from lapcli.runtime.ranks import World


class Guess(torch.nn.Module):
    """Per-image logits: the grey levels of the first ten pixels."""

    def forward(self, images_BCHW):
        return images_BCHW[:, 0].flatten(1)[:, 20:30] + torch.arange(10) * 1e-3


@pytest.fixture(scope="module")
def images():
    return open_images(image_recipe().data, 10).validation


def looks():
    recipe = image_recipe()
    return recipe.data, recipe.model.image


def by_hand(images):
    """Top-1 and top-5 counts from sorted pixel values."""
    recipe = image_recipe().data
    correct = {1: 0, 5: 0}
    for index in range(len(images)):
        pixels = np.asarray(images.image(index))[..., 0].reshape(-1)[20:30].astype(np.float64)
        logits = (pixels / 255 - recipe.mean[0]) / recipe.std[0] + np.arange(10) * 1e-3
        ranking = np.argsort(-logits, kind="stable")
        for k in correct:
            correct[k] += int(images.labels[index] in ranking[:k])
    return correct


@pytest.mark.parametrize(("batch", "size"), [(7, 1), (100, 2)])
def test_every_image_is_counted_once(images, batch, size):
    total = {"images": 0, 1: 0, 5: 0}
    for rank in range(size):
        world = OneOf(rank, size)
        measure_accuracy(Guess(), images, *looks(), world, batch)
        seen, _, top1, top5 = world.counted[0]
        for key, count in (("images", seen), (1, top1), (5, top5)):
            total[key] += int(count)
    assert total == {"images": len(images), **by_hand(images)}


class OneOf(World):
    """One process of several; its contribution is kept for the test to add up."""

    def __init__(self, rank, size):
        super().__init__(rank, size, torch.device("cpu"))
        object.__setattr__(self, "counted", [])

    def sum(self, values):
        self.counted.append(values)
        return [max(values[0], 1.0), *values[1:]]


def test_non_finite_outputs_are_not_scored(images):
    class Broken(Guess):
        def forward(self, x):
            return super().forward(x) * float("nan")

    with pytest.raises(LapError, match="not finite"):
        measure_accuracy(Broken(), images, *looks(), World(0, 1, torch.device("cpu")), 100)


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (351, 359), (9535, 10_000)])
def test_the_interval_matches_scipy(successes, count):
    expected = binomtest(successes, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


TEMPERATURE = 0.07


@pytest.fixture
def clusters():
    """Features of five overlapping classes, in random order."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(5, 16))
    labels = generator.integers(5, size=700)
    features = centres[labels] + 1.5 * generator.normal(size=(700, 16))
    return features.astype(np.float32), labels


@pytest.mark.parametrize("k", [1, 20])
def test_the_classes_match_scikit_learn(clusters, k, monkeypatch):
    """scikit-learn's neighbours by cosine distance, with votes weighted by exp(similarity / 0.07)."""
    monkeypatch.setattr(accuracy, "KEYS_AT_ONCE", 64)
    monkeypatch.setattr(accuracy, "QUERIES_AT_ONCE", 33)
    features, labels = clusters
    oracle = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / TEMPERATURE)
    ).fit(features[:500].astype(np.float64), labels[:500])
    expected = oracle.predict(features[500:].astype(np.float64))
    keys, queries = F.normalize(torch.from_numpy(features[:500]), dim=1), torch.from_numpy(features[500:])
    found = classify(queries, keys, torch.from_numpy(labels[:500]), 5, sorted({k, 200}), TEMPERATURE)
    assert (found[k].numpy() == expected).all()
    assert 0.3 < (expected == labels[500:]).mean() < 0.999  # neither hopeless nor trivial


def test_neighbours_match_a_dense_search_for_any_chunk_size(clusters, monkeypatch):
    features = torch.from_numpy(clusters[0])
    queries, keys = features[600:], features[:600]
    order = torch.argsort(queries.double() @ keys.double().T, dim=1, descending=True)[:, :20]
    for size in (13, 600, 5):  # 5: fewer keys at once than neighbours are wanted
        monkeypatch.setattr(accuracy, "KEYS_AT_ONCE", size)
        similarity, index = nearest(queries, keys, 20)
        assert torch.equal(index, order)
        assert torch.allclose(similarity, (queries @ keys.T).gather(1, order), atol=1e-4)
