"""Colours of patches: planted components and identical patches."""

import numpy as np

from lapcli.analysis.measurements.features import colours


def test_colours_of_planted_components():
    """Three independent sign patterns give three components: every patch is near 0 or 1 in each colour."""
    signs = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], dtype=float)
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 3)))[0].T
    rgb, shares = colours(signs * [3, 2, 1] @ directions + 5)
    np.testing.assert_allclose(shares, np.array([9, 4, 1]) / 14, rtol=1e-9)
    high = 1 / (1 + np.exp(-2))  # one deviation, whatever the component's size
    for column in range(3):
        agrees = (rgb[:, column] > 0.5) == (signs[:, column] > 0)
        assert agrees.all() or not agrees.any()
    np.testing.assert_allclose(np.maximum(rgb, 1 - rgb), high)
