"""Muon: momentum whose step is orthogonalised by Newton-Schulz iterations.

    m <- m + (1 - mu)(G - m)        an average, not a sum
    U  = (1 - mu) G + mu m          Nesterov
    W <- W - lr sqrt(max(1, out/in)) orthogonalise(U)

torch.optim.Muon takes the same step, but always in bf16 (several times slower than float32 on a CPU), one matrix
after the other, and not on shards. Here matrices of one shape are batched, in the requested precision. Sharded ones are
orthogonalised each by one rank, which gets their rows from all ranks and returns them.

Shapes: M matrices of one shape, R rows, C columns (R <= C inside the iteration).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import MuonSection
from lapcli.training.optimizers import Optimizer, as_param_groups

# Keller Jordan's quintic: it drives singular values into about [0.7, 1.2] in five steps.
A, B, C = 3.4445, -4.7750, 2.0315

# How large a rounding error of the Gram matrix may grow, relative to the singular values near 1 that are wanted.
_GRAM_TOLERANCE = 5e-3

# Elements of the matrices processed at a time, over all ranks, which bounds the scratch memory.
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
    """Muon for two-dimensional weights, complete or with their rows sharded over the ranks."""

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
            params = [p for p in group["params"] if p.grad is not None]
            averages = [_local(self._average(p)) for p in params]
            gradients = [_local(p.grad) for p in params]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            for members in stacks([p.shape for p in params], _LARGEST_STACK):
                rows, columns = params[members[0]].shape
                lr = group["lr"] * max(1.0, rows / columns) ** 0.5
                before, after = ([each[i] for i in members] for each in (gradients, averages))
                updates = torch._foreach_lerp(before, after, group["momentum"])
                steps = self._orthogonal([params[i] for i in members], updates, group)
                weights = [_local(params[i]) for i in members]
                torch._foreach_add_(weights, [x.to(w.dtype) for x, w in zip(steps, weights, strict=True)], alpha=-lr)

    def _orthogonal(self, params: list[Any], updates: Sequence[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
        """Return this rank's rows of the orthogonalised updates of matrices of one shape."""
        if not isinstance(params[0], DTensor):
            return orthogonalise(torch.stack(list(updates)), group["steps"], group["dtype"]).unbind()
        return _by_owner(params, updates, lambda stack: orthogonalise(stack, group["steps"], group["dtype"]))

    def _average(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        average: Tensor = state["momentum"]
        return average


def stacks(shapes: Sequence[torch.Size | tuple[int, ...]], largest: int) -> list[list[int]]:
    """Group matrices of one shape, at most `largest` elements of them together, or one matrix."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape), []).append(i)
    groups = []
    for shape, members in by_shape.items():
        size = max(1, largest // math.prod(shape))
        groups += [members[first : first + size] for first in range(0, len(members), size)]
    return groups


def _by_owner(
    params: Sequence[DTensor], updates: Sequence[Tensor], orthogonalise: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Orthogonalise matrices of one shape whose rows are sharded over the ranks, each matrix by one rank.

    Matrix i belongs to rank i mod ranks, which receives its rows from all ranks and returns theirs: two all-to-alls.
    """
    mesh = params[0].device_mesh
    ranks, rank = mesh.size(), mesh.get_local_rank()
    rows, columns = params[0].shape
    chunk = -(-rows // ranks)  # of FSDP: the last ranks may have fewer rows, or none
    heights = [max(0, min(chunk, rows - chunk * other)) for other in range(ranks)]
    owned = [list(range(other, len(params), ranks)) for other in range(ranks)]
    sent = [len(mine) * heights[rank] * columns for mine in owned]
    received = [len(owned[rank]) * height * columns for height in heights]
    ordered = [updates[i] for mine in owned for i in mine]
    outgoing = torch.cat([x.flatten() for x in ordered])
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=mesh.get_group())
    if owned[rank]:
        parts = [
            part.view(len(owned[rank]), height, columns)
            for part, height in zip(incoming.split(received), heights, strict=True)
        ]
        done = orthogonalise(torch.cat(parts, dim=1)).to(outgoing.dtype)
        incoming = torch.cat([part.flatten() for part in done.split(heights, dim=1)])
    dist.all_to_all_single(outgoing, incoming, sent, received, group=mesh.get_group())
    mine = iter(outgoing.view(len(params), heights[rank], columns).unbind())
    by_index = {i: next(mine) for each in owned for i in each}
    return [by_index[i] for i in range(len(params))]


def _local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class MuonOptimizer(Optimizer):
    """Muon, for matrices only; the GPT uses AdamW for its embedding and its head."""

    name = "muon"
    section = MuonSection

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return Muon(as_param_groups(groups), lr=groups[0].lr)

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(p)}


MUON = MuonOptimizer()
