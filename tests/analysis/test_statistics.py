"""Principal components against scikit-learn's."""

import numpy as np
from sklearn import decomposition

from lapcli.analysis.statistics import principal_components


def test_components_match_scikit_learn():
    x = np.random.default_rng(0).normal(size=(50, 6)) * [5, 3, 2, 1, 1, 1] + 4
    places, directions, shares = principal_components(x, 2)
    theirs = decomposition.PCA(2).fit(x)
    np.testing.assert_allclose(shares, theirs.explained_variance_ratio_, rtol=1e-9)
    np.testing.assert_allclose(np.abs(directions @ theirs.components_.T), np.eye(2), atol=1e-9)
    np.testing.assert_allclose(np.abs(places), np.abs(theirs.transform(x)), atol=1e-9)
    assert all(row[np.abs(row).argmax()] > 0 for row in directions)
