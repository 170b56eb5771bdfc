"""Muon against torch's, against plain Newton-Schulz in float64, and on one process against two."""

import pytest
import torch
from torch import Tensor

from lapcli.training import optimizers
from lapcli.training.optimizers import Muon, orthogonalise

torch.set_num_threads(2)

SHAPES = [(24, 24), (96, 24), (24, 96), (30, 24), (24, 24), (7, 40)]


def draw(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def newton_schulz(G: Tensor, steps: int = 5) -> Tensor:
    """One matrix in float64, iteration by iteration."""
    X = G.double()
    if X.shape[0] > X.shape[1]:
        return newton_schulz(G.T, steps).T
    X = X / ((X**2).sum().sqrt() + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def with_spectrum(shape: tuple[int, int], values: Tensor) -> Tensor:
    """A matrix with random singular vectors and the given singular values, in float64."""
    U, _ = torch.linalg.qr(draw((shape[0], len(values)), 1, torch.float64))
    V, _ = torch.linalg.qr(draw((shape[1], len(values)), 2, torch.float64))
    return U @ torch.diag(values) @ V.T


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


class TestOrthogonalise:
    @pytest.mark.parametrize("shape", [(24, 24), (24, 47), (96, 24), (7, 100), (8, 1)])
    @pytest.mark.parametrize("steps", [1, 5])
    def test_against_float64(self, shape: tuple[int, int], steps: int) -> None:
        stack = draw((3, *shape))
        ours = orthogonalise(stack, steps, torch.float32)
        for G, X in zip(stack, ours, strict=True):
            torch.testing.assert_close(X.double(), newton_schulz(G, steps), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("shape", [(128, 128), (512, 128)])
    @pytest.mark.parametrize("decay", [0.5, 2.0])
    def test_steep_spectra_in_bf16(self, shape: tuple[int, int], decay: float) -> None:
        """Singular values i^-decay, decaying like those of gradients: the smallest are below bf16's rounding."""
        G = with_spectrum(shape, torch.arange(1, 129, dtype=torch.float64) ** -decay).float()
        exact, rounded = (orthogonalise(G[None], 5, dtype)[0].double() for dtype in (torch.float32, torch.bfloat16))
        assert torch.linalg.svdvals(rounded)[0] < 1.4
        assert cosine(rounded, exact) > (0.97 if decay == 2 else 0.99)


def train(optimizer: torch.optim.Optimizer, params: list[Tensor], steps: int) -> None:
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = draw(tuple(p.shape), seed=1000 * step + i)
        optimizer.step()


class TestStep:
    def test_against_torch(self) -> None:
        """torch's runs Newton-Schulz in bf16, so the paths agree to a few percent of their length."""
        ours, theirs = ([draw(shape, seed=50 + i) for i, shape in enumerate(SHAPES)] for _ in range(2))
        start = [p.clone() for p in ours]
        train(Muon(ours, lr=0.02, momentum=0.9), ours, steps=4)
        reference = torch.optim.Muon(
            theirs, lr=0.02, momentum=0.9, weight_decay=0.0, nesterov=True, adjust_lr_fn="original"
        )
        train(reference, theirs, steps=4)
        for first, a, b in zip(start, ours, theirs, strict=True):
            assert (a - b).norm() < 0.03 * (b - first).norm(), tuple(a.shape)

    def test_three_steps_by_hand(self) -> None:
        """An average m, not a sum; Nesterov; sqrt(max(1, out/in)); no weight decay."""
        mu, lr = 0.9, 0.02
        params = [draw(shape, seed=50 + i) for i, shape in enumerate(SHAPES)]
        expected = [p.double() for p in params]
        optimizer = Muon(params, lr=lr, momentum=mu)
        train(optimizer, params, steps=3)
        for i, (p, W) in enumerate(zip(params, expected, strict=True)):
            m = torch.zeros_like(W)
            for step in range(3):
                G = draw(tuple(W.shape), seed=1000 * step + i).double()
                m = mu * m + (1 - mu) * G
                U = (1 - mu) * G + mu * m
                out, into = W.shape
                W = W - lr * (out / into if out > into else 1) ** 0.5 * newton_schulz(U)
            torch.testing.assert_close(p.double(), W, atol=1e-5, rtol=0)
            torch.testing.assert_close(optimizer.state[p]["momentum"].double(), m, atol=1e-6, rtol=0)

    def test_results_do_not_depend_on_the_stack_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results = []
        for largest in (1, 2 * 24 * 24, 2**26):
            monkeypatch.setattr(optimizers, "_LARGEST_STACK", largest)
            params = [draw((24, 24), seed=i) for i in range(5)]
            train(Muon(params, lr=0.1), params, steps=2)
            results.append(torch.stack(params))
        torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)
        torch.testing.assert_close(results[0], results[2], atol=1e-6, rtol=0)
