"""Sinkhorn-Knopp as it is defined, dense in float64, against the blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.objectives.dino_losses import sinkhorn_targets


def dense(logits_NK, temperature, iterations=3):
    """The textbook: Q is K x N, prototypes and samples take turns to sum to 1/K and 1/N."""
    Q = (logits_NK.double() / temperature).exp().T
    K, N = Q.shape
    Q = Q / Q.sum()
    for _ in range(iterations):
        Q = Q / Q.sum(1, keepdim=True) / K
        Q = Q / Q.sum(0, keepdim=True) / N
    return (Q * N).T


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(2, 30), st.integers(1, 5), st.integers(0, 10**6))
def test_against_the_definition(samples, prototypes, iterations, seed):
    logits = torch.randn(samples, prototypes, generator=torch.Generator().manual_seed(seed)) * 0.3
    found = sinkhorn_targets(logits.clone(), 0.05, iterations)
    assert torch.allclose(found.double(), dense(logits, 0.05, iterations), atol=1e-5)


def test_logits_of_bf16_are_not_rounded_again():
    """All that follows is float32, although a factor without dimensions does not make it so."""
    logits = (torch.randn(37, 11, generator=torch.Generator().manual_seed(0)) * 0.3).bfloat16()
    found = sinkhorn_targets(logits, 0.05)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), dense(logits, 0.05), rtol=1e-4, atol=1e-6)


def test_a_process_without_samples():
    assert sinkhorn_targets(torch.zeros(0, 11), 0.05).shape == (0, 11)


@pytest.mark.parametrize("size", [10.0, 1000.0])
def test_large_logits_do_not_overflow(size):
    """exp(10 / 0.04) is far beyond float32; adding a constant to all logits changes nothing."""
    logits = torch.randn(20, 6) * 0.2
    assert torch.allclose(sinkhorn_targets(logits + size, 0.04), sinkhorn_targets(logits.clone(), 0.04), atol=1e-2)
    assert torch.isfinite(sinkhorn_targets(torch.randn(20, 6) * size, 0.04)).all()


def test_by_hand():
    """Two samples, two prototypes, Q = [[4, 1], [1, 1]] (samples are rows), one iteration.

    Prototypes sum to 5 and 2: rows become (4/5, 1/2) and (1/5, 1/2), which are divided by 13/10 and 7/10.
    """
    logits = torch.tensor([[4.0, 1.0], [1.0, 1.0]]).log() * 0.5
    found = sinkhorn_targets(logits, 0.5, 1)
    assert torch.allclose(found, torch.tensor([[8 / 13, 5 / 13], [2 / 7, 5 / 7]]), atol=1e-6)
