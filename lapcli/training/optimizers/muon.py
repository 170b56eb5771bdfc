"""Muon: momentum whose step is orthogonalised by Newton-Schulz iterations.

    m <- m + (1 - mu)(G - m)        an average, not a sum
    U  = (1 - mu) G + mu m          Nesterov
    W <- W - lr sqrt(max(1, out/in)) orthogonalise(U)

torch.optim.Muon takes the same step, but always in bf16 (several times slower than float32 on a CPU), one matrix
after the other, and all of them on every rank. Here matrices of one shape go through together, in the precision
asked for, and each rank orthogonalises its share and gathers the others'.

Shapes: M matrices of one shape, R rows, C columns (R <= C inside the iteration).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import MuonSection
from lapcli.runtime.devices import compute_policy
from lapcli.training.optimizers.optimizer import Optimizer, as_param_groups

# Keller Jordan's quintic: it drives singular values into about [0.7, 1.2] in five steps.
A, B, C = 3.4445, -4.7750, 2.0315

# How large a rounding error of the Gram matrix may become, where singular values of 1 are wanted.
_GRAM_TOLERANCE = 5e-3

# Matrices that go through one iteration together: bounds the scratch memory at a few of these.
_LARGEST_STACK = 2**26


def orthogonalise(matrices_MRC: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: U V^T of U S V^T with singular values near 1."""
    X = matrices_MRC.to(dtype)
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.mT
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + 1e-7)
    # The iteration multiplies X from the left by polynomials of A = X X^T. For a wide X it is cheaper to iterate on
    # the small A alone and to multiply X once: 17 R^3 + 2 R^2 C products against 5 R^3 + 10 R^2 C.
    wide = X.shape[-1] >= 2 * X.shape[-2]
    X = _through_gram(X, steps) if wide and _gram_is_safe(steps, dtype) else _directly(X, steps)
    return X.mT if tall else X


def _gram_is_safe(steps: int, dtype: torch.dtype) -> bool:
    """Whether the iteration on the Gram matrix stays near the iteration on X.

    Rounding gives X X^T eigenvalues of about -eps beside a largest one near 1. Small eigenvalues grow by A^2 in each of
    the steps - 1 updates, the negative ones too, and beyond -1 they explode. Gradients have steep spectra, so there
    are always such eigenvalues: in float32 five steps are the most, bf16 cannot take this route at all.
    """
    return torch.finfo(dtype).eps * A ** (2 * (steps - 1)) < _GRAM_TOLERANCE


def _directly(X: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), X, beta=A)
    return X


def _through_gram(X: Tensor, steps: int) -> Tensor:
    gram = X @ X.mT
    product: Tensor | None = None
    for step in range(steps):
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(A)
        product = polynomial if product is None else polynomial @ product
        if step < steps - 1:
            gram = polynomial @ gram @ polynomial
    return X if product is None else product @ X


class Muon(torch.optim.Optimizer):
    """For two-dimensional weights; every rank must hold the same averaged gradients, as DDP leaves them."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        steps: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                at_once = max(1, _LARGEST_STACK // shape.numel())
                for i in range(0, len(params), at_once):
                    self._update(params[i : i + at_once], group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        averages = [self._average(p) for p in params]
        gradients = [p.grad for p in params if p.grad is not None]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        updates = list(torch._foreach_lerp(gradients, averages, group["momentum"]))
        orthogonal = _shared_over_ranks(updates, lambda stack: orthogonalise(stack, group["steps"], group["dtype"]))
        rows, columns = params[0].shape
        lr = group["lr"] * max(1.0, rows / columns) ** 0.5
        torch._foreach_add_(params, [x.to(p.dtype) for x, p in zip(orthogonal, params, strict=True)], alpha=-lr)

    def _average(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        average: Tensor = state["momentum"]
        return average


def _shared_over_ranks(matrices: list[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """`work` on each matrix, done by rank i % world_size and gathered by all."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return list(work(torch.stack(matrices)).unbind())
    world, rank = dist.get_world_size(), dist.get_rank()
    share = -(-len(matrices) // world)
    # A short last share is padded with zeros, which stay zeros.
    mine = [
        matrices[i] if i < len(matrices) else torch.zeros_like(matrices[0]) for i in range(rank, share * world, world)
    ]
    done = work(torch.stack(mine)).contiguous()
    gathered = done.new_empty((world * share, *done.shape[1:]))
    dist.all_gather_into_tensor(gathered, done)
    return [gathered[i % world * share + i // world] for i in range(len(matrices))]


class MuonOptimizer(Optimizer):
    """For matrices alone; the GPT gives its embedding and its head to AdamW."""

    name = "muon"
    section = MuonSection

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        parts = as_param_groups(groups)
        for part in parts:
            if part.get("dtype") is None:
                bf16 = compute_policy(part["params"][0].device).native_bf16
                part["dtype"] = torch.bfloat16 if bf16 else torch.float32
        return Muon(parts, lr=groups[0].lr)

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(p)}


MUON = MuonOptimizer()
