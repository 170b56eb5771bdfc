"""Optimizers: the interface, AdamW, LAMB, Muon, and the optimizers of an objective's parameter groups together.

To add one, subclass `Optimizer`, give it a recipe section, and name it in `OPTIMIZERS`, or from another package with
`extensions.add("optimizer", ...)`. Its state is tensors with names, which a checkpoint stores.

Muon is momentum whose step is orthogonalised by Newton-Schulz iterations:

    m <- m + (1 - mu)(G - m)        an average, not a sum
    U  = (1 - mu) G + mu m          Nesterov
    W <- W - lr sqrt(max(1, out/in)) orthogonalise(U)

torch.optim.Muon takes the same step, but always in bf16 (several times slower than float32 on a CPU), one matrix
after the other, and not on shards. Here matrices of one shape are batched, in the requested precision. Each sharded
matrix is orthogonalised by one rank, which gathers its rows from all ranks and returns them.

Shapes: M matrices of one shape, R rows, C columns (R <= C inside the iteration).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lapcli.checkpoint import load_tensors
from lapcli.objectives.objective import ParameterGroup
from lapcli.recipe.optimizers import AdamWSection, MuonSection, OptimizerSection
from lapcli.runtime.plugins import Registry

# Keller Jordan's quintic: it drives singular values into about [0.7, 1.2] in five steps.
A, B, C = 3.4445, -4.7750, 2.0315

# The allowed growth of a rounding error of the Gram matrix, relative to the target singular values near 1.
_GRAM_TOLERANCE = 5e-3

# Elements of the matrices processed at a time, over all ranks, which bounds the scratch memory.
_LARGEST_STACK = 2**26


class Optimizer(ABC):
    """One optimizer: its name and section in a recipe, how it is built, and its state for a parameter.

    With several processes, parameters, averaged gradients and states are sharded DTensors: elementwise code needs
    no change.
    """

    name: ClassVar[str]
    section: ClassVar[type[OptimizerSection]]  # its section of a recipe, whose `options` are those of the groups
    clips_itself: ClassVar[bool] = False  # the loop then only computes the gradient norm, for the metrics
    group_state: ClassVar[tuple[str, ...]] = ()  # parts of the state that the optimizer holds once for a group

    @abstractmethod
    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """Build the optimizer of all groups that name it, with one entry of `param_groups` per group, in order."""

    @abstractmethod
    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state of a parameter, by name, on the devices where the optimizer has it.

        A checkpoint stores these tensors, and `lap plan` counts their bytes, with a parameter on the meta device.
        """


def as_param_groups(groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """Convert groups to the format of torch's optimizers."""
    return [{"params": list(group.parameters.values()), "lr": group.lr, **group.options} for group in groups]


class AdamW(Optimizer):
    """AdamW: torch's own, fused on devices that have a fused kernel."""

    name = "adamw"
    section = AdamWSection
    # The step counter is on the parameter's device, because a fused kernel reads it; elsewhere on the CPU.
    counts_on: ClassVar[tuple[str, ...]] = ("cuda", "meta")

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        devices = {p.device.type for group in groups for p in group.parameters.values()}
        return torch.optim.AdamW(as_param_groups(groups), fused=devices <= {"cpu", "cuda"})

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        count = torch.zeros((), dtype=torch.float32, device=p.device if p.device.type in self.counts_on else "cpu")
        # In the dtype of the parameter: the moments of a bf16 embedding are bf16, as in nanochat.
        return {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class Lamb(AdamW):
    """LAMB: timm's, which scales AdamW's update of each parameter by the ratio of its norms.

    It clips the norm of all gradients that it updates, so all groups share one optimizer, and it counts the steps per
    group, on the CPU.
    """

    name = "lamb"
    clips_itself = True
    counts_on = ("meta",)
    group_state = ("step",)

    def build(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        from timm.optim.lamb import Lamb as TimmLamb

        # timm reads the clipping from the defaults, not from the groups.
        clip = groups[0].options.get("max_grad_norm", 1.0)
        return TimmLamb(as_param_groups(groups), lr=groups[0].lr, max_grad_norm=clip)


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
    #
    # Rounding gives X X^T eigenvalues of about -eps beside a largest one near 1. Small eigenvalues grow by A^2 in each
    # of the steps - 1 updates, the negative ones too, and beyond -1 they explode. Gradients have steep spectra, so
    # such eigenvalues always exist: float32 allows at most five steps, bf16 none.
    is_safe = torch.finfo(dtype).eps * A ** (2 * (steps - 1)) < _GRAM_TOLERANCE
    gram = X @ X.mT
    if X.shape[-1] >= 2 * X.shape[-2] and is_safe:
        product: Tensor | None = None
        for step in range(steps):
            polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(A)
            product = polynomial if product is None else polynomial @ product
            if step < steps - 1:
                gram = polynomial @ gram @ polynomial  # X is multiplied by the polynomial, which is symmetric
        X = X if product is None else product @ X
    else:
        for step in range(steps):
            gram = gram if step == 0 else X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), X, beta=A)
    return X.mT if tall else X


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
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            averages = [_local(self.state[p]["momentum"]) for p in params]
            gradients = [_local(p.grad) for p in params]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            by_shape: dict[tuple[int, ...], list[int]] = {}
            for i, p in enumerate(params):
                by_shape.setdefault(tuple(p.shape), []).append(i)
            for (rows, columns), places in by_shape.items():
                lr, size = group["lr"] * max(1.0, rows / columns) ** 0.5, max(1, _LARGEST_STACK // (rows * columns))
                for members in (places[first : first + size] for first in range(0, len(places), size)):
                    before, after = ([each[i] for i in members] for each in (gradients, averages))
                    updates: Sequence[Tensor] = torch._foreach_lerp(before, after, group["momentum"])
                    if isinstance(params[members[0]], DTensor):
                        updates = _by_owner([params[i] for i in members], updates, group["steps"], group["dtype"])
                    else:
                        updates = orthogonalise(torch.stack(list(updates)), group["steps"], group["dtype"]).unbind()
                    weights = [_local(params[i]) for i in members]
                    torch._foreach_add_(
                        weights, [x.to(w.dtype) for x, w in zip(updates, weights, strict=True)], alpha=-lr
                    )


def _by_owner(params: Sequence[DTensor], updates: Sequence[Tensor], steps: int, dtype: torch.dtype) -> list[Tensor]:
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
        done = orthogonalise(torch.cat(parts, dim=1), steps, dtype).to(outgoing.dtype)
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


ADAMW, LAMB, MUON = AdamW(), Lamb(), MuonOptimizer()
OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer", {name: f"{__name__}:{name.upper()}" for name in ("adamw", "lamb", "muon")}
)


class Optimizers:
    """The optimizers of all groups, stepped together; the schedule multiplies each group's learning rate."""

    def __init__(self, groups: list[ParameterGroup]) -> None:
        self.groups = groups
        by_name: dict[str, list[ParameterGroup]] = {}
        self._clipped: dict[str, list[Tensor]] = {}  # sets of parameters that share a gradient norm
        for group in groups:
            by_name.setdefault(group.optimizer, []).append(group)
            self._clipped.setdefault(group.clipped_with, []).extend(group.parameters.values())
        self._optimizers = {name: OPTIMIZERS[name].build(members) for name, members in by_name.items()}
        self.clip_themselves = any(OPTIMIZERS[name].clips_itself for name in by_name)
        # Each group's entry of `param_groups`, whose lr and options change with the step.
        parts = {name: iter(optimizer.param_groups) for name, optimizer in self._optimizers.items()}
        self._inner = [next(parts[group.optimizer]) for group in groups]

    def set_rates(self, multiplier: float, step: int = 0) -> None:
        """Set the learning rates, then the options that depend on the step, which may override them."""
        for group, inner in zip(self.groups, self._inner, strict=True):
            inner["lr"] = group.lr * multiplier
            if group.at_step is not None:
                inner.update(group.at_step(step))

    def gradient_norms(self) -> list[Tensor]:
        """Return the norm of each set of parameters that is clipped together, on their device."""
        gradients = ([p.grad for p in parameters if p.grad is not None] for parameters in self._clipped.values())
        norms = [torch.nn.utils.get_total_norm(each) for each in gradients]
        return [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]

    def clip(self, limit: float | None, norms: Sequence[Tensor], known: Sequence[float]) -> None:
        """Clip the gradients of each set of parameters whose norm exceeds the limit; None: no limit.

        `known` are the norms already copied to the host: below the limit nothing is done, which saves a
        pass over all gradients. The factor is computed on the device.
        """
        if limit is None or self.clip_themselves:
            return
        for parameters, norm, number in zip(self._clipped.values(), norms, known, strict=True):
            if number > limit:
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    def step(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Return the state as tensors named `<state>/<parameter>`, independent of the number of ranks.

        A parameter without gradients so far has its initial state.
        """
        named = {}
        for name, holder, key, initial in self._tensors():
            value = torch.as_tensor(holder.get(key, initial), dtype=initial.dtype)
            named[name] = value.clone() if value.ndim == 0 else value  # one file cannot hold a group's count twice
        return named

    def load_state(self, source: Path) -> None:
        """Load tensors returned by `state`, from a file or from parts."""
        tensors = list(self._tensors())
        load_tensors(source, {name: initial for name, _, _, initial in tensors})
        for _, holder, key, initial in tensors:
            holder[key] = initial

    def _tensors(self) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
        """Yield each tensor of the state: its name, the dictionary and the key that hold it, and its initial value."""
        for group, inner in zip(self.groups, self._inner, strict=True):
            declared, optimizer = OPTIMIZERS[group.optimizer], self._optimizers[group.optimizer]
            for name, p in group.parameters.items():
                for key, initial in declared.new_state(p).items():
                    holder = inner if key in declared.group_state else optimizer.state[p]
                    yield f"{key}/{name}", holder, key, initial


def state_bytes(groups: Sequence[ParameterGroup]) -> int:
    """Return the size of the optimizer states of all parameters in bytes."""
    total = 0
    for group in groups:
        for p in group.parameters.values():
            state = OPTIMIZERS[group.optimizer].new_state(torch.empty_like(p, device="meta"))
            total += sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return total
