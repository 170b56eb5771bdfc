"""What figures show of the tokens themselves: samples, principal components, the simplex, feature maps."""

import numpy as np
import pytest
import torch
from sklearn import decomposition

from lapcli.analysis.features import colours
from lapcli.analysis.pca import principal_components
from lapcli.analysis.sample import TokenSample
from lapcli.analysis.simplex import CORNERS, Simplex, simplex_map


def test_components_are_scikit_learns():
    x = np.random.default_rng(0).normal(size=(50, 6)) * [5, 3, 2, 1, 1, 1] + 4
    places, directions, shares = principal_components(x, 2)
    theirs = decomposition.PCA(2).fit(x)
    np.testing.assert_allclose(shares, theirs.explained_variance_ratio_, rtol=1e-9)
    np.testing.assert_allclose(np.abs(directions @ theirs.components_.T), np.eye(2), atol=1e-9)
    np.testing.assert_allclose(np.abs(places), np.abs(theirs.transform(x)), atol=1e-9)
    assert all(row[np.abs(row).argmax()] > 0 for row in directions)


def test_components_that_do_not_exist_are_zero():
    places, _, shares = principal_components(np.full((5, 3), 0.1), 2)
    assert not places.any()
    assert not shares.any()
    line = np.arange(6.0)[:, None] * [[1.0, 2.0]]
    assert principal_components(line, 3)[2] == pytest.approx([1, 0, 0])


def test_a_sample_does_not_depend_on_batches_and_keeps_to_its_classes():
    rng = np.random.default_rng(0)
    x, labels = torch.from_numpy(rng.normal(size=(30, 4, 3))), torch.from_numpy(rng.integers(0, 5, 30))

    def sampled(batch, seed=0):
        sample = TokenSample([1, 3], seed, size=20)
        for first in range(0, 30, batch):
            sample.update(x[first : first + batch], labels[first : first + batch], first)
        return sample.tokens()

    tokens, classes = sampled(30)
    assert len(tokens) == 20
    assert set(classes) == {1, 3}
    for batch in (1, 7):
        np.testing.assert_array_equal(sampled(batch)[0], tokens)
    assert not np.array_equal(sampled(30, seed=1)[0], tokens)
    for token, label in zip(tokens, classes, strict=True):  # each is a token of a sequence of that class
        sequence, _ = np.argwhere((x.numpy() == token).all(axis=2))[0]
        assert labels[sequence] == label


def test_the_corners_are_an_equilateral_triangle():
    np.testing.assert_allclose(CORNERS @ CORNERS.T, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(CORNERS @ np.ones(3), 0, atol=1e-12)
    sides = [np.linalg.norm(CORNERS[:, i] - CORNERS[:, j]) for i, j in ((0, 1), (1, 2), (0, 2))]
    np.testing.assert_allclose(sides, np.sqrt(2))


def test_orthonormal_rows_go_to_the_corners_and_scale_of_rows_does_not_matter():
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))[0].T
    np.testing.assert_allclose(simplex_map(rows) @ rows.T, CORNERS, atol=1e-12)
    np.testing.assert_allclose(simplex_map(rows * [[2.0], [5.0], [0.1]]), simplex_map(rows), atol=1e-12)


def test_a_classifier_of_exactly_three_classes_is_of_rank_two_and_still_has_a_place():
    """U V^T is not unique then, but what is free is the direction of ones, which the triangle does not see."""
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))[0].T
    frame = rows - rows.mean(axis=0)
    placed = simplex_map(frame) @ frame.T
    np.testing.assert_allclose(np.linalg.norm(placed, axis=0), np.linalg.norm(placed[:, 0]), rtol=1e-9)
    assert np.isfinite(placed).all()


def test_tokens_on_the_simplex():
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))[0].T
    labels = np.array([4, 2, 7, 2])
    tokens = torch.from_numpy(np.repeat(rows[[1, 0, 2, 0]][:, None], 2, axis=1))
    simplex = Simplex(rows, [2, 4, 7], center=False, seed=0)
    simplex.update(tokens, torch.from_numpy(labels), 0)
    found = simplex.result()
    assert found.values == {"tokens_shown": 8, "nearest_corner_share": 1.0}
    for place, label in zip(found.points["place"], found.points["class"], strict=True):
        np.testing.assert_allclose(place, CORNERS[:, [2, 4, 7].index(label)], atol=1e-12)
    centred = Simplex(rows, [2, 4, 7], center=True, seed=0)
    centred.update(tokens, torch.from_numpy(labels), 0)
    np.testing.assert_allclose(centred.result().points["place"].mean(axis=0), 0, atol=1e-12)
    empty = Simplex(rows, [0, 1, 3], center=False, seed=0)
    empty.update(tokens, torch.from_numpy(labels), 0)
    assert "--classes" in empty.result().notes[0]


def test_colours_of_planted_components():
    """Three independent signs over the patches are three components: every patch is near 0 or 1 in each colour."""
    signs = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], dtype=float)
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 3)))[0].T
    rgb, shares = colours(signs * [3, 2, 1] @ directions + 5)
    np.testing.assert_allclose(shares, np.array([9, 4, 1]) / 14, rtol=1e-9)
    high = 1 / (1 + np.exp(-2))  # one deviation, whatever the component's size
    for column in range(3):
        agrees = (rgb[:, column] > 0.5) == (signs[:, column] > 0)
        assert agrees.all() or not agrees.any()
    np.testing.assert_allclose(np.maximum(rgb, 1 - rgb), high)


def test_equal_patches_are_grey():
    rgb, shares = colours(np.full((4, 3), 0.3))
    np.testing.assert_array_equal(rgb, 0.5)
    assert not shares.any()
