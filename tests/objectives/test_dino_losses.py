"""Each loss against loops over pairs, patches and neighbours in float64, values and gradients; blockwise
Sinkhorn-Knopp against its dense definition in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.models.compiling import compiled_once
from lapcli.objectives.dino_losses import (
    dino_loss,
    koleo_loss,
    patch_weights,
    sinkhorn_targets,
    target_cross_entropy,
)
from lapcli.runtime.devices import ComputePolicy

TAU = 0.1


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def entropy(target_K, x_D, prototypes_KD):
    return -(target_K * torch.log_softmax(prototypes_KD @ x_D / TAU, 0)).sum()


def assert_same_gradients(ours, theirs, *inputs):
    for found, expected in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("locals_", [0, 1, 8])
def test_dino_is_the_mean_over_18_pairs(locals_):
    B, G, K, D = 3, 2, 7, 5
    student = drawn(B * (G + locals_), D).requires_grad_()
    prototypes = drawn(K, D, seed=1).requires_grad_()
    targets = drawn(G * B, K, seed=2).softmax(1)
    pairs = {"local": [], "global": []}
    for image in range(B):
        for teacher in range(G):
            for crop in range(G + locals_):
                if crop != teacher:
                    value = entropy(targets[teacher * B + image], student[crop * B + image], prototypes)
                    pairs["global" if crop < G else "local"].append(value)
    total, local, among = dino_loss(student, prototypes, targets, B, TAU)
    means = {name: sum(values) / len(values) if values else torch.zeros(()) for name, values in pairs.items()}
    terms = G * locals_ + G * (G - 1)
    expected = (G * locals_ / terms) * means["local"] + (G * (G - 1) / terms) * means["global"]
    if locals_ == 8:
        assert (G * locals_ / terms, G * (G - 1) / terms) == (16 / 18, 2 / 18)
    assert float(total.detach()) == pytest.approx(float(expected.detach()))
    assert [float(local), float(among)] == pytest.approx([float(means[n].detach()) for n in ("local", "global")])
    assert_same_gradients(total, expected, student, prototypes)


def test_ibot_is_divided_by_all_crops():
    """Two of four crops are masked; a crop contributes the mean over its patches, and the sum is divided by four."""
    masks = torch.zeros(4, 6, dtype=torch.bool)
    masks[1, :3] = masks[3, 5] = True
    hidden = torch.tensor([6, 7, 8, 23])  # patches 0 to 2 of the second crop, 5 of the fourth
    student, prototypes = drawn(4, 5).requires_grad_(), drawn(7, 5, seed=1).requires_grad_()
    targets = drawn(4, 7, seed=2).softmax(1)
    values = [entropy(t, x, prototypes) for t, x in zip(targets, student, strict=True)]
    expected = (sum(values[:3]) / 3 + values[3]) / 4
    found, _ = target_cross_entropy(student, prototypes, targets, patch_weights(masks, hidden), TAU)
    assert float(found.detach()) == pytest.approx(float(expected.detach()))
    assert_same_gradients(found, expected, student, prototypes)
    assert patch_weights(masks, hidden).tolist() == pytest.approx([1 / 12] * 3 + [1 / 4])


def test_koleo_by_hand():
    """At angles 0, 90 and 120 degrees the neighbours are 1, 2 and 1, at chords 2 sin(angle / 2)."""
    angles = torch.tensor([0.0, 90.0, 120.0]) * math.pi / 180
    one_crop = 5 * torch.stack([angles.cos(), angles.sin()], 1)  # length does not matter
    near, far = 2 * math.sin(math.radians(15)), 2 * math.sin(math.radians(45))
    expected = -(math.log(far) + 2 * math.log(near)) / 3
    assert float(koleo_loss(one_crop, crops=1, group=3)) == pytest.approx(expected, rel=1e-5)
    # Both crops have weight 1: twice upstream's mean over them.
    assert float(koleo_loss(one_crop.repeat(2, 1), crops=2, group=3)) == pytest.approx(2 * expected, rel=1e-5)


def test_koleo_neighbours_share_crop_and_group():
    tokens = drawn(2 * 6, 4).float()
    expected = 0.0
    for crop in tokens.view(2, 6, 4):
        per_image = []
        for group in torch.nn.functional.normalize(crop, dim=1).view(2, 3, 4):
            distances = torch.cdist(group, group) + 10 * torch.eye(3)
            per_image += (-distances.amin(1).log()).tolist()
        expected += sum(per_image) / 6
    assert float(koleo_loss(tokens, crops=2, group=3)) == pytest.approx(expected, rel=1e-4)


def test_bf16_rows_give_nearly_the_same_loss():
    x, prototypes = drawn(30, 16).float(), drawn(50, 16, seed=1).float().requires_grad_()
    targets, weights = drawn(30, 50, seed=2).float().softmax(1), torch.full((30,), 1 / 30)
    exact, _ = target_cross_entropy(x, prototypes, targets, weights, TAU)
    rough, _ = target_cross_entropy(x.bfloat16(), prototypes, targets, weights, TAU)
    assert float(rough.detach()) == pytest.approx(float(exact.detach()), rel=1e-2)
    a, b = (torch.autograd.grad(loss, prototypes)[0] for loss in (exact, rough))
    assert b.dtype == torch.float32
    assert float((a - b).norm() / a.norm()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_compiled_matches_eager(dtype: torch.dtype, tolerance: float) -> None:
    """Targets and both losses, at two teacher temperatures, without a recompilation."""
    torch.compiler.reset()
    compiled_once.cache_clear()
    logits = (drawn(24, 64) * 0.3).to(dtype)
    student, prototypes = drawn(120, 16, seed=1).to(dtype), drawn(64, 16, seed=2).float()
    for temperature in (0.05, 0.07):
        results = []
        for policy in (ComputePolicy("cpu"), ComputePolicy("cpu", compiles=True)):
            inputs = [student.clone().requires_grad_(), prototypes.clone().requires_grad_()]
            targets = sinkhorn_targets(logits.clone(), temperature, 3, policy)
            parts = dino_loss(*inputs, targets, 12, 0.1, policy)
            own, _ = target_cross_entropy(inputs[0][:24], inputs[1], targets, targets.new_ones(24), 0.1, None, policy)
            gradients = torch.autograd.grad(parts[0] + own, inputs)
            results.append([targets, *parts, own, *gradients])
        for plain, compiled in zip(*results, strict=True):
            assert plain.dtype == compiled.dtype
            assert (plain.double() - compiled.double()).norm() <= tolerance * plain.double().norm()
        if temperature == 0.05:
            counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted


def dense(logits_NK, temperature, iterations=3):
    """The textbook: Q is K x N; prototypes and samples are normalised in turn to sums of 1/K and 1/N."""
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
    """Everything after it is float32, although a 0-dimensional factor does not promote."""
    logits = (torch.randn(37, 11, generator=torch.Generator().manual_seed(0)) * 0.3).bfloat16()
    found = sinkhorn_targets(logits, 0.05)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), dense(logits, 0.05), rtol=1e-4, atol=1e-6)


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
