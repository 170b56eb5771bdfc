"""Tokens on the simplex of three classes: the map, its invariances, and tokens with known places."""

import numpy as np
import torch

from lapcli.analysis.measurements.simplex import CORNERS, SimplexAccumulator, simplex_map


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
    simplex = SimplexAccumulator(rows, [2, 4, 7], seed=0)
    simplex.update(tokens, torch.from_numpy(labels), 0)
    found = simplex.result()
    assert found.values == {"tokens_shown": 8, "nearest_corner_share": 1.0}
    for place, label in zip(found.points["place"], found.points["class"], strict=True):
        np.testing.assert_allclose(place, CORNERS[:, [2, 4, 7].index(label)], atol=1e-12)
    empty = SimplexAccumulator(rows, [0, 1, 3], seed=0)
    empty.update(tokens, torch.from_numpy(labels), 0)
    assert "--classes" in empty.result().notes[0]
