"""Spectrum over sequences: numpy's singular values, planted ranks, invariances, degenerate input."""

import numpy as np
import pytest
import torch
from analysis_support import of_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.analysis.measurements.spectrum import ALPHAS, Spectrum


def measured(x, batch=100):
    return of_tokens(Spectrum, x.split(batch))


def tokens(seed, sequences=3, count=7, width=5):
    return torch.randn(sequences, count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_mean_deviation_and_k_are_computed_over_sequences():
    x = tokens(1, sequences=5)
    found = measured(x)
    values = np.stack([np.linalg.svd(s - s.mean(axis=0), compute_uv=False) ** 2 for s in x.numpy()])
    np.testing.assert_allclose(found.series["eigenvalue_mean"], values.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(found.series["eigenvalue_std"], values.std(axis=0), rtol=1e-8)
    for alpha in ALPHAS:
        needed = [next(k for k in range(1, 6) if v[:k].sum() / v.sum() >= alpha) for v in values]
        assert found.values[f"k_{alpha}"] == pytest.approx(np.mean(needed))


@pytest.mark.parametrize("tall", [True, False])
def test_a_planted_signal_gives_its_k(tall):
    """Energies 90, 9, 0.9, 0.1 in orthogonal directions: 1, 2, 3 components for 0.9, 0.99, 0.999."""
    T, D = (40, 8) if tall else (8, 40)
    rng = np.random.default_rng(0)
    # Columns that are orthogonal to the vector of ones stay orthogonal when the tokens are centred.
    left = np.linalg.qr(np.column_stack([np.ones(T), rng.normal(size=(T, 4))]))[0][:, 1:]
    right = np.linalg.qr(rng.normal(size=(D, 4)))[0]
    planted = left * np.sqrt([90, 9, 0.9, 0.1]) @ right.T + rng.normal(size=D)
    found = measured(torch.from_numpy(planted)[None])
    assert [found.values[f"k_{alpha}"] for alpha in ALPHAS] == [1, 2, 3]
    np.testing.assert_allclose(found.series["eigenvalue_mean"][:4], [90, 9, 0.9, 0.1], rtol=1e-9)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 5), st.integers(2, 9), st.integers(1, 9)),
    st.floats(0.01, 100),
    st.integers(1, 5),
)
def test_invariance_to_rotation_shift_and_order_and_quadratic_scaling(seed, shape, scale, batch):
    x = tokens(seed, *shape)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(shape[2], shape[2], dtype=torch.float64, generator=generator))[0]
    moved = scale * x[torch.randperm(shape[0], generator=generator)][:, torch.randperm(shape[1], generator=generator)]
    moved = moved @ rotation + 3 * scale
    one, other = measured(x), measured(moved, batch)
    largest = one.series["eigenvalue_mean"][0]
    for name in ("eigenvalue_mean", "eigenvalue_std"):
        difference = one.series[name] - other.series[name] / scale**2
        assert np.abs(difference).max() <= 1e-6 * max(largest, 1e-30)
    assert one.values["k_0.99"] == pytest.approx(other.values["k_0.99"])


def test_sequences_of_identical_tokens_have_no_k():
    constant = torch.full((2, 5, 3), 0.1, dtype=torch.float32).double()
    assert measured(constant).values["k_0.99"] is None
    mixed = measured(torch.cat([constant, tokens(0, 2, 5, 3)]))
    assert mixed.values["k_0.99"] == measured(tokens(0, 2, 5, 3)).values["k_0.99"]
