"""Measures of tokens: eigenvalues against numpy's singular values, components against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn import decomposition

from lapcli.measures.tokens import eigenvalues, k_alpha, principal_components, within_sequence_share


@pytest.mark.parametrize(("count", "width"), [(4, 9), (9, 4), (6, 6), (2, 3)])
def test_eigenvalues_are_squared_singular_values_of_the_centred_tokens(count, width):
    x = torch.randn(3, count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, sequence in zip(eigenvalues(x).numpy(), x.numpy(), strict=True):
        theirs = np.linalg.svd(sequence - sequence.mean(axis=0), compute_uv=False) ** 2
        assert np.abs(ours - theirs).max() <= 1e-12 * theirs[0]


def test_a_share_that_is_reached_exactly_counts():
    assert k_alpha(torch.tensor([[9.0, 1.0]], dtype=torch.float64), 0.9).tolist() == [1]
    assert k_alpha(torch.tensor([[3.0, 3.0, 3.0]], dtype=torch.float64), 2 / 3).tolist() == [2]


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


def test_equal_tokens_have_no_share():
    assert within_sequence_share(torch.full((2, 3, 4), 0.1, dtype=torch.float64)) is None
