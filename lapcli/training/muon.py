"""Muon: momentum whose step is orthogonalised by Newton-Schulz iterations.

    m <- m + (1 - mu)(G - m)        an average, not a sum
    U  = (1 - mu) G + mu m          Nesterov
    W <- W - lr sqrt(max(1, out/in)) orthogonalise(U)

torch.optim.Muon takes the same step, but always in bf16 (several times slower than float32 on a CPU), one matrix
after the other, and all of them on every rank. Here matrices of one shape are batched, in the requested precision, and
each rank orthogonalises its share and gathers the others'. Shares are balanced by FLOPs over all shapes.

Shapes: M matrices of one shape, R rows, C columns (R <= C inside the iteration).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import MuonSection
from lapcli.training.optimizers import Optimizer, as_param_groups

# Keller Jordan's quintic: it drives singular values into about [0.7, 1.2] in five steps.
A, B, C = 3.4445, -4.7750, 2.0315

# How large a rounding error of the Gram matrix may grow, relative to the singular values near 1 that are wanted.
_GRAM_TOLERANCE = 5e-3

# Elements of the matrices processed at a time, over all ranks. It bounds the scratch memory of a rank: one buffer of
# this size, in which all ranks' results are gathered, and a few of the size of its own share.
_LARGEST_STACK = 2**26


def orthogonalise(matrices_MRC: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices: U V^T of U S V^T, with singular values near 1."""
    X = matrices_MRC.to(dtype)
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.mT  # transposed, so that X X^T is the smaller Gram matrix
    # The Frobenius norm bounds the largest singular value by 1; far beyond 1 the iteration diverges.
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + 1e-7)  # a zero gradient stays zero instead of NaN
    # The iteration multiplies X from the left by polynomials of A = X X^T. For a wide X it is cheaper to iterate
    # only on the small A and to multiply X once: 17 R^3 + 2 R^2 C products against 5 R^3 + 10 R^2 C.
    wide = X.shape[-1] >= 2 * X.shape[-2]
    X = _through_gram(X, steps) if wide and _gram_is_safe(steps, dtype) else _directly(X, steps)
    return X.mT if tall else X


def _gram_is_safe(steps: int, dtype: torch.dtype) -> bool:
    """Return whether the iteration on the Gram matrix stays near the iteration on X.

    Rounding gives X X^T eigenvalues of about -eps beside a largest one near 1. Small eigenvalues grow by A^2 in each of
    the steps - 1 updates, the negative ones too, and beyond -1 they explode. Gradients have steep spectra, so there
    are always such eigenvalues: float32 allows at most five steps, bf16 none.
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
            gram = polynomial @ gram @ polynomial  # X is multiplied by the polynomial, which is symmetric
    return X if product is None else product @ X


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional weights; every rank must have the same averaged gradients, as with DDP."""

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
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            # Every rank updates all averages, so that rank 0 can save them whatever the number of ranks.
            averages = [self._average(p) for p in params]
            torch._foreach_lerp_(averages, [p.grad for p in params], 1 - group["momentum"])
            # Shares follow from the shapes alone, so that all ranks know them without communicating.
            for shares in rounds([p.shape for p in params], ranks, _LARGEST_STACK):
                done = self._orthogonal([params[i] for i in shares[rank]], group)
                parts = [[params[i] for i in share] for share in shares]
                for share, stack in zip(parts, _gathered(done, parts, group["dtype"]), strict=True):
                    if share:
                        self._add(share, stack, group)

    def _orthogonal(self, params: list[Tensor], group: dict[str, Any]) -> Tensor | None:
        """Return the orthogonalised Nesterov step of matrices of one shape."""
        if not params:
            return None
        averages = [self._average(p) for p in params]
        gradients = [p.grad for p in params if p.grad is not None]
        updates = torch._foreach_lerp(gradients, averages, group["momentum"])
        return orthogonalise(torch.stack(list(updates)), group["steps"], group["dtype"])

    def _add(self, params: list[Tensor], orthogonal: Tensor, group: dict[str, Any]) -> None:
        rows, columns = params[0].shape
        lr = group["lr"] * max(1.0, rows / columns) ** 0.5
        steps = [x.to(p.dtype) for x, p in zip(orthogonal.unbind(), params, strict=True)]
        torch._foreach_add_(params, steps, alpha=-lr)

    def _average(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        average: Tensor = state["momentum"]
        return average


def rounds(shapes: Sequence[torch.Size | tuple[int, ...]], ranks: int, largest: int) -> list[list[list[int]]]:
    """Return the matrices that each rank orthogonalises in each round, after which the results are gathered.

    Matrices are assigned in order of decreasing cost, each to the rank with the least load: no rank has more than 4/3
    of its load in the best assignment, and equal matrices are distributed evenly. A rank's share of a round has one
    shape, so that it is batched, and at most `largest / ranks` elements, or one matrix.
    """
    # The shape breaks ties of the cost: matrices of one shape follow each other and can be batched.
    order = sorted(range(len(shapes)), key=lambda i: (-cost(shapes[i]), tuple(shapes[i])))
    loads, owned = [0] * ranks, [list[list[int]]() for _ in range(ranks)]
    for i in order:
        rank = loads.index(min(loads))
        loads[rank] += cost(shapes[i])
        stacks, size = owned[rank], math.prod(shapes[i])
        if stacks and shapes[stacks[-1][0]] == shapes[i] and (len(stacks[-1]) + 1) * size * ranks <= largest:
            stacks[-1].append(i)
        else:
            stacks.append([i])
    count = max(map(len, owned), default=0)
    return [[stacks[turn] if turn < len(stacks) else [] for stacks in owned] for turn in range(count)]


def cost(shape: torch.Size | tuple[int, ...]) -> int:
    """Estimate the FLOPs of an iteration, up to a factor: X X^T, a product with it, and the square of X X^T."""
    short, long = sorted(shape)
    return 2 * short * short * long + short**3


def _gathered(done: Tensor | None, parts: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Gather the results of all ranks on every rank; shares are padded to the largest, as all_gather needs."""
    if len(parts) == 1:
        return [done] if done is not None else []
    sizes = [sum(p.numel() for p in part) for part in parts]
    device = next(p.device for part in parts for p in part)
    share = torch.zeros(max(sizes), dtype=dtype, device=device)
    if done is not None:
        share[: done.numel()] = done.flatten()
    gathered = torch.empty(len(parts) * max(sizes), dtype=dtype, device=device)
    dist.all_gather_into_tensor(gathered, share)
    rows = gathered.view(len(parts), -1)
    shapes = [(len(part), *part[0].shape) if part else (0,) for part in parts]
    return [row[:size].view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]


class MuonOptimizer(Optimizer):
    """Muon, for matrices only; the GPT uses AdamW for its embedding and its head."""

    name = "muon"
    section = MuonSection

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return Muon(as_param_groups(groups), lr=groups[0].lr)

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(p)}


MUON = MuonOptimizer()
