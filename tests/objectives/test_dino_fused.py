"""What the compiler is given for Sinkhorn-Knopp and the cross entropy: as it is in float64, and compiled."""

from collections.abc import Iterator

import pytest
import torch

from lapcli.models.compiling import compiled_once
from lapcli.objectives import dino_losses
from lapcli.objectives.dino_losses import dino_loss, sinkhorn_targets, target_cross_entropy
from lapcli.runtime.devices import ComputePolicy

FUSED, PLAIN = ComputePolicy("cpu", compiles=True), ComputePolicy("cpu")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dino_losses, "compiled_once", lambda function: function)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    compiled_once.cache_clear()
    yield
    compiled_once.cache_clear()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(logits_NK: torch.Tensor, temperature: float, iterations: int) -> torch.Tensor:
    Q = (logits_NK.double() / temperature).exp()
    for _ in range(iterations):
        Q = Q / Q.sum(0)
        Q = Q / Q.sum(1, keepdim=True)
    return Q


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_sinkhorn_as_it_is_defined(iterations: int) -> None:
    logits = drawn(37, 11) * 0.3
    found = sinkhorn_targets(logits.clone(), 0.05, iterations, FUSED)
    torch.testing.assert_close(found, dense(logits, 0.05, iterations), rtol=1e-11, atol=1e-14)


@pytest.mark.usefixtures("uncompiled")
def test_logits_of_bf16_are_not_rounded_again() -> None:
    """All that follows is float32, although a factor without dimensions does not make it so."""
    logits = (drawn(37, 11) * 0.3).bfloat16()
    found = sinkhorn_targets(logits, 0.05, 3, FUSED)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), dense(logits, 0.05, 3), rtol=1e-4, atol=1e-6)
    assert torch.isfinite(sinkhorn_targets(logits * 1000, 0.04, 3, FUSED)).all()


@pytest.mark.usefixtures("uncompiled")
def test_a_process_without_samples() -> None:
    assert sinkhorn_targets(drawn(0, 11), 0.05, 3, FUSED).shape == (0, 11)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("targets_each", [1, 2])
def test_cross_entropy_against_autograd(targets_each: int) -> None:
    x, prototypes = drawn(12, 5).requires_grad_(), drawn(7, 5, seed=1).requires_grad_()
    targets, weights = drawn(6, 7, seed=2).softmax(1), drawn(12, seed=3).abs()
    rows = torch.randint(6, (12, targets_each), generator=torch.Generator().manual_seed(4))
    rows[::3, 1:] = -1
    total, each = target_cross_entropy(x, prototypes, targets, weights, 0.1, rows, FUSED)
    summed = sum(torch.where(rows[:, [j]] >= 0, targets[rows[:, j].clamp(min=0)], 0.0) for j in range(targets_each))
    expected = -(summed * (x @ prototypes.T / 0.1).log_softmax(1)).sum(1)
    torch.testing.assert_close(each, expected.detach())
    inputs = [x, prototypes]
    pairs = zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    )
    for found, truth in pairs:
        torch.testing.assert_close(found, truth)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_compiled_is_the_plain_way(dtype: torch.dtype, tolerance: float) -> None:
    """Targets and both losses, at two temperatures of the teacher, for which nothing is compiled again."""
    logits = (drawn(24, 64) * 0.3).to(dtype)
    student, prototypes = drawn(120, 16, seed=1).to(dtype), drawn(64, 16, seed=2).float()
    for temperature in (0.05, 0.07):
        results = []
        for policy in (PLAIN, FUSED):
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
