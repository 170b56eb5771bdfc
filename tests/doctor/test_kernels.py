"""The checks of kernels pass for ours and fail for each way in which one of them could be wrong."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from lapcli.doctor import kernels
from lapcli.doctor.kernels import (
    CASES,
    check_attention,
    check_compiled,
    check_language_loss,
    check_muon,
    check_targets_loss,
    compared,
    kernel_checks,
)
from lapcli.heads.laplacian import laplacian_attention
from lapcli.models.chunked_loss import softcapped_cross_entropy
from lapcli.objectives.dino_losses import sinkhorn_targets, target_cross_entropy
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.errors import UsageError
from lapcli.training.muon import Muon

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
    """The right output, whose gradient does not reach the keys."""
    return laplacian_attention(q, k.detach() + 0 * k, v, laplacian_heads, **options)


def not_a_number(q, k, v, laplacian_heads, **options):
    return laplacian_attention(q, k, v, laplacian_heads, **options) * float("nan")


@pytest.mark.parametrize("kernel", [without_laplacian, without_mask, wrong_backward, not_a_number])
@pytest.mark.parametrize("case", CASES[2:], ids=lambda case: case.name)
def test_a_broken_kernel(case, kernel):
    found = check_attention(case, FLOAT, CPU, kernel)
    assert found.status == "fails", found
    assert "train.precision=float32" in found.next_step


@pytest.mark.slow
def test_compiled():
    """Without a compiler of machine code here; the command itself has one compiled."""
    eager = check_compiled(CPU, compile_=lambda f: torch.compile(f, backend="aot_eager"))
    assert eager.status == "passes"
    assert check_compiled(CPU, compile_=lambda f: lambda *x: f(*x) * 1.01).status == "fails"

    def missing(device_type):
        raise UsageError("no compiler")

    assert check_compiled(CPU, has_compiler=missing).status == "warns"


class SumOfGradients(Muon):
    """A momentum that adds up instead of averaging."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(self.state[p].get("momentum", 0.0), alpha=1.0)
        super().step()


class FourSteps(Muon):
    def __init__(self, params, **options):
        super().__init__(params, **{**options, "steps": 4})


class WithoutFactor(Muon):
    """Tall matrices get no larger step."""

    def step(self, closure=None):
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        super().step()
        for p, start in zip(self.param_groups[0]["params"], before, strict=True):
            rows, columns = p.shape
            p.data = start + (p.data - start) / max(1.0, rows / columns) ** 0.5


def test_muon():
    assert check_muon(FLOAT, CPU).status == "passes"


@pytest.mark.parametrize("wrong", [FourSteps, WithoutFactor, SumOfGradients])
def test_a_wrong_muon(wrong):
    found = check_muon(FLOAT, CPU, wrong)
    assert found.status == "fails", found
    assert "newton_schulz_precision=float32" in found.next_step


def test_losses():
    assert check_language_loss(FLOAT, CPU).status == "passes"
    assert check_targets_loss(FLOAT, CPU).status == "passes"


def uncapped(x, weight, targets, softcap, **options):
    return softcapped_cross_entropy(x, weight, targets, 50.0, **options)


def counts_all(x, weight, targets, softcap, **options):
    return softcapped_cross_entropy(x, weight, targets.clamp(min=0), softcap, **options)


@pytest.mark.parametrize("wrong", [uncapped, counts_all])
def test_a_wrong_language_loss(wrong):
    assert check_language_loss(FLOAT, CPU, wrong).status == "fails"


def test_wrong_targets():
    assert check_targets_loss(FLOAT, CPU, lambda z, t, n, p: sinkhorn_targets(z, t, 2, p)).status == "fails"
    assert check_targets_loss(FLOAT, CPU, lambda z, t, n, p: (z / t).softmax(1)).status == "fails"

    def colder(x, w, targets, weights, temperature, policy):
        return target_cross_entropy(x, w, targets, weights, 0.09, policy=policy)

    assert check_targets_loss(FLOAT, CPU, loss=colder).status == "fails"


def test_what_is_not_a_number_is_not_within_a_limit():
    one, nothing = torch.ones(2), torch.tensor([1.0, float("nan")])
    for computed, status in (([one, one], "passes"), ([one * 1.1, one], "fails"), ([nothing, one], "fails")):
        for order in (computed, computed[::-1]):
            assert compared(order, [one, one], 1e-2, "x", "y").status == status
    assert compared([one, None], [one, one], 1e-2, "x", "y").status == "fails"  # a gradient that is missing


def test_kernels_are_those_that_training_prefers(monkeypatch):
    """Of a GPU of the newest kind, whose preference is set while each check runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    before, orders = torch._C._get_sdp_priority_order(), []
    monkeypatch.setattr(kernels, "check_attention", lambda *case: orders.append(torch._C._get_sdp_priority_order()))
    kernel_checks(torch.device("cuda"))[0].run()
    assert orders[0][0] == int(SDPBackend.CUDNN_ATTENTION)
    assert torch._C._get_sdp_priority_order() == before


def test_losses_are_compiled_where_training_compiles_them(monkeypatch):
    assert kernels.training_policy(torch.device("cuda")).compiles
    assert not kernels.training_policy(CPU).compiles
    monkeypatch.setattr(kernels, "training_policy", lambda device: ComputePolicy("cpu", compiles=True))
    seen = []

    def loss(*arguments, compiled, policy):
        seen.append(compiled and policy.compiles)
        return softcapped_cross_entropy(*arguments, policy=policy)

    def balance(z, t, n, policy):
        seen.append(policy.compiles)
        return sinkhorn_targets(z, t, n, ComputePolicy("cpu"))

    assert check_language_loss(FLOAT, CPU, loss).status == "passes"

    def cross_entropy(*arguments, policy):
        return target_cross_entropy(*arguments, policy=ComputePolicy("cpu"))

    assert check_targets_loss(FLOAT, CPU, balance, cross_entropy).status == "passes"
    assert seen == [True, True]


def test_on_the_cpu_bf16_is_not_needed():
    needed = {check.name: check.is_needed for check in kernel_checks(CPU)}
    assert len(needed) == 15
    assert all(is_needed is ("bf16" not in name) for name, is_needed in needed.items())
    assert all(check.is_needed for check in kernel_checks(torch.device("cuda")))
