"""The kernel checks pass for our kernels and fail for each kind of faulty kernel."""

import pytest
import torch

from lapcli.doctor.kernels import (
    CASES,
    check_attention,
    check_language_loss,
    check_muon,
    check_targets_loss,
)
from lapcli.heads.laplacian import laplacian_attention
from lapcli.models.chunked_loss import softcapped_cross_entropy
from lapcli.objectives.dino_losses import sinkhorn_targets, target_cross_entropy
from lapcli.training.optimizers import Muon

CPU, FLOAT = torch.device("cpu"), torch.float32
SMALL = CASES[1:]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_attention(case):
    found = check_attention(case, FLOAT, CPU)
    assert found.status == "passes"
    assert 0 < found.numbers["error"] < 1e-5


def without_laplacian(q, k, v, laplacian_heads, **options):
    return laplacian_attention(q, k, v, 0, **options)


def without_mask(q, k, v, laplacian_heads, *, causal, mask):
    return laplacian_attention(q, k, v, laplacian_heads)


def wrong_backward(q, k, v, laplacian_heads, **options):
    """The correct output, but without a gradient for the keys."""
    return laplacian_attention(q, k.detach() + 0 * k, v, laplacian_heads, **options)


@pytest.mark.parametrize("kernel", [without_laplacian, without_mask, wrong_backward])
@pytest.mark.parametrize("case", CASES[2:], ids=lambda case: case.name)
def test_a_broken_kernel(case, kernel):
    found = check_attention(case, FLOAT, CPU, kernel)
    assert found.status == "fails", found


class WithoutFactor(Muon):
    """Tall matrices do not get a larger step."""

    def step(self, closure=None):
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        super().step()
        for p, start in zip(self.param_groups[0]["params"], before, strict=True):
            rows, columns = p.shape
            p.data = start + (p.data - start) / max(1.0, rows / columns) ** 0.5


def test_muon():
    assert check_muon(FLOAT, CPU).status == "passes"


def test_a_wrong_muon():
    assert check_muon(FLOAT, CPU, WithoutFactor).status == "fails"


def test_losses():
    assert check_language_loss(FLOAT, CPU).status == "passes"
    assert check_targets_loss(FLOAT, CPU).status == "passes"


def counts_all(x, weight, targets, softcap, **options):
    return softcapped_cross_entropy(x, weight, targets.clamp(min=0), softcap, **options)


def test_a_wrong_language_loss():
    assert check_language_loss(FLOAT, CPU, counts_all).status == "fails"


def test_wrong_targets():
    assert check_targets_loss(FLOAT, CPU, lambda z, t, n, p: sinkhorn_targets(z, t, 2, p)).status == "fails"
    assert check_targets_loss(FLOAT, CPU, lambda z, t, n, p: (z / t).softmax(1)).status == "fails"

    def colder(x, w, targets, weights, temperature, policy):
        return target_cross_entropy(x, w, targets, weights, 0.09, policy=policy)

    assert check_targets_loss(FLOAT, CPU, loss=colder).status == "fails"
