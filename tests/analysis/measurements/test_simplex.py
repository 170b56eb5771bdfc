"""Tokens on the simplex of three classes: the map, its invariances, and tokens with known positions."""

import numpy as np

from lapcli.analysis.measurements.scatter import CORNERS, on_simplex, simplex_map


def test_the_corners_are_an_equilateral_triangle():
    np.testing.assert_allclose(CORNERS @ CORNERS.T, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(CORNERS @ np.ones(3), 0, atol=1e-12)
    sides = [np.linalg.norm(CORNERS[:, i] - CORNERS[:, j]) for i, j in ((0, 1), (1, 2), (0, 2))]
    np.testing.assert_allclose(sides, np.sqrt(2))


def test_orthonormal_rows_map_to_the_corners_at_any_scale():
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))[0].T
    np.testing.assert_allclose(simplex_map(rows) @ rows.T, CORNERS, atol=1e-12)
    np.testing.assert_allclose(simplex_map(rows * [[2.0], [5.0], [0.1]]), simplex_map(rows), atol=1e-12)


def test_tokens_on_the_simplex():
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 3)))[0].T
    labels = np.array([4, 2, 7, 2])
    found = on_simplex(rows[[1, 0, 2, 0]], labels, rows, [2, 4, 7])
    assert found.values == {"tokens_shown": 4, "nearest_corner_share": 1.0}
    for place, label in zip(found.points["place"], found.points["class"], strict=True):
        np.testing.assert_allclose(place, CORNERS[:, [2, 4, 7].index(label)], atol=1e-12)
    assert on_simplex(rows[:0], labels[:0], rows, [0, 1, 3]).values == {"tokens_shown": 0}
