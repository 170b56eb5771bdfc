"""The chunked loss against the plain one: full logits, soft cap, torch's cross entropy."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lapcli.models import chunked_loss
from lapcli.models.chunked_loss import softcapped_cross_entropy

torch.set_num_threads(2)

peak_bytes = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "measure.py"))["peak_bytes"]


def plain(x: Tensor, weight: Tensor, targets: Tensor, softcap: float, reduction: str = "mean") -> Tensor:
    logits = softcap * torch.tanh(x @ weight.T / softcap)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)


def draw(
    N: int, V: int, D: int, ignored: float = 0.3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N + V)
    x, weight = (torch.randn(n, D, generator=generator).to(dtype).requires_grad_() for n in (N, V))
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = -1
    return x, weight, targets


def assert_same(x: Tensor, weight: Tensor, targets: Tensor, softcap: float, reduction: str, tolerance: float) -> None:
    ours = softcapped_cross_entropy(x, weight, targets, softcap, reduction)
    theirs = plain(x, weight, targets, softcap, reduction)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    pairs = [torch.autograd.grad(3 * loss, (x, weight)) for loss in (ours, theirs)]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@settings(deadline=None, max_examples=40)
@given(
    N=st.integers(1, 40),
    V=st.integers(1, 60),
    D=st.integers(1, 9),
    chunk=st.integers(1, 50),
    softcap=st.floats(0.5, 50.0),
    ignored=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_any_shape_in_float64(N: int, V: int, D: int, chunk: int, softcap: float, ignored: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "CHUNK_BYTES", {"cpu": 8 * chunk * V})
        patch.setattr(chunked_loss, "FEWEST_ROWS", 1)
        x, weight, targets = draw(N, V, D, ignored, torch.float64)
        targets[0] = 0  # the plain mean over nothing is not a number
        assert_same(x, weight, targets, softcap, "mean", 1e-12)


@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
def test_gradients_over_bf16_logits_have_one_rounding(size: float) -> None:
    """Against float64 autograd from the same rounded logits: the stored gradient is rounded once."""
    generator = torch.Generator().manual_seed(0)
    z = (torch.randn(20, 300, generator=generator) * size).bfloat16()
    targets = torch.randint(300, (20,), generator=generator)
    targets[3] = -1
    exact = z.double().requires_grad_()
    expected = F.cross_entropy(15.0 * torch.tanh(exact / 15.0), targets, ignore_index=-1, reduction="none")
    expected.sum().backward()
    losses = chunked_loss._softcapped(z, targets, 15.0, (targets >= 0).float())
    losses = losses * (targets >= 0)
    torch.testing.assert_close(losses.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(z.double(), exact.grad, atol=1e-6, rtol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.float32, 1e-5, marks=pytest.mark.long), (torch.bfloat16, 0.02)]
)
def test_compiled_loss_matches_eager(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks and a remainder, with float32 weights, against the plain loss in float64."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", {"cpu": 8 * 50 * dtype.itemsize})
    monkeypatch.setattr(chunked_loss, "FEWEST_ROWS", 1)
    x, weight, targets = draw(20, 50, 64, dtype=dtype)
    weight = weight.detach().float().requires_grad_()
    loss = softcapped_cross_entropy(x, weight, targets, 15.0, compiled=True)
    wide = [y.detach().double().requires_grad_() for y in (x, weight)]
    expected = plain(*wide, targets, 15.0)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    pairs = zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, wide), strict=True)
    for ours, theirs in pairs:
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.slow
def test_memory_is_at_most_a_quarter_of_the_plain_loss() -> None:
    x, weight, targets = draw(512, 65_536, 4)
    peaks = [peak_bytes(lambda loss=loss: loss(x, weight, targets, 15.0).backward()) for loss in
             (softcapped_cross_entropy, plain)]  # fmt: skip
    assert peaks[1] > 3 * 512 * 65_536 * 4  # the plain one holds several copies of all logits
    assert peaks[0] <= peaks[1] / 4
    evaluated = peak_bytes(lambda: softcapped_cross_entropy(x, weight, targets, 15.0, "none"))
    assert evaluated <= peaks[0]
