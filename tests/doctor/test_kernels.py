"""The checks of kernels pass for ours and fail for each way in which one of them could be wrong."""

import pytest
import torch

from lapcli.data.images.colours import ColourParameters, Recolouring
from lapcli.doctor.kernels import (
    CASES,
    KernelNames,
    backend_finding,
    check_attention,
    check_attention_speed,
    check_backend,
    check_colours,
    check_compiled,
    check_language_loss,
    check_muon,
    check_targets_loss,
    kernel_checks,
)
from lapcli.heads.laplacian import laplacian_attention
from lapcli.models.chunked_loss import softcapped_cross_entropy
from lapcli.objectives.dino_losses import sinkhorn_targets, target_cross_entropy
from lapcli.runtime.errors import UsageError
from lapcli.training.optimizers.muon import Muon

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


def test_the_kernel_is_named():
    assert "flash" in check_backend(CPU).text


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        ([], "no fused kernel"),
        (["_scaled_dot_product_attention_math"], "no fused kernel"),
        (["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_backward"], "different kernels"),
    ],
)
def test_attention_without_a_kernel_or_with_two(ran, said):
    names = KernelNames()
    names.names = ran
    found = backend_finding(names, "cuda")
    assert (found.status, said in found.text) == ("fails", True)


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


def test_colours_of_crops():
    assert check_colours(CPU).status == "passes"

    def without_colours(source):
        nothing = torch.tensor([ColourParameters().numbers()])
        return lambda crops, drawn: Recolouring(source)(crops, nothing.expand_as(drawn))

    found = check_colours(CPU, without_colours)
    assert found.status == "fails"
    assert found.numbers["largest"] > 10


def test_the_slower_attention_kernel():
    cuda = torch.device("cuda")
    both = {"flash": 2e-3, "cudnn": 1e-3}
    assert check_attention_speed(cuda, lambda device: both, "cudnn").status == "passes"
    found = check_attention_speed(cuda, lambda device: both, "flash")
    assert (found.status, "flash 2 ms, cudnn 1 ms, but runs prefer flash" in found.text) == ("warns", True)
    assert check_attention_speed(cuda, lambda device: {"flash": 2e-3, "cudnn": None}, "cudnn").status == "warns"
    assert check_attention_speed(cuda, lambda device: dict.fromkeys(both), "cudnn").status == "fails"
    assert check_attention_speed(CPU).status == "passes"


def test_on_the_cpu_bf16_is_not_needed():
    needed = {check.name: check.is_needed for check in kernel_checks(CPU)}
    assert len(needed) == 18
    assert all(is_needed is ("bf16" not in name) for name, is_needed in needed.items())
    assert all(check.is_needed for check in kernel_checks(torch.device("cuda")))
