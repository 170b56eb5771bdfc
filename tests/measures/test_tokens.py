"""Measures of tokens: eigenvalues against numpy's singular values."""

import math

import numpy as np
import pytest
import torch

from lapcli.measures.tokens import bits_per_byte, eigenvalues, k_alpha
from lapcli.runtime.errors import DataError


@pytest.mark.parametrize(("count", "width"), [(4, 9), (9, 4), (6, 6), (2, 3)])
def test_eigenvalues_are_the_squared_singular_values_of_centred_tokens(count, width):
    x = torch.randn(3, count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, sequence in zip(eigenvalues(x).numpy(), x.numpy(), strict=True):
        theirs = np.linalg.svd(sequence - sequence.mean(axis=0), compute_uv=False) ** 2
        assert np.abs(ours - theirs).max() <= 1e-12 * theirs[0]


def test_a_fraction_that_is_reached_exactly_counts():
    assert k_alpha(torch.tensor([[9.0, 1.0]], dtype=torch.float64), 0.9).tolist() == [1]
    assert k_alpha(torch.tensor([[3.0, 3.0, 3.0]], dtype=torch.float64), 2 / 3).tolist() == [2]


def test_an_empty_text_has_no_bits_per_byte():
    with pytest.raises(DataError, match="the held-out text"):
        bits_per_byte(0.0, 0, "the held-out text")
    assert bits_per_byte(math.log(2), 2, "two bytes") == pytest.approx(0.5)
