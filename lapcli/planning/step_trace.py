"""FLOPs and memory of a training step, traced on fake tensors: shapes are propagated, nothing is computed.

A fake tensor of the CPU is dispatched to the same kernels as a real one, so autograd saves the same
tensors. A compiled graph on a GPU is assumed to save the same: torch.compile keeps both sides of an activation
function, because the matmul after it needs its result in the backward.
"""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lapcli.objectives.objective import Objective
from lapcli.training.optimizers import Optimizers

CPU = torch.device("cpu")
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PARTS = ACTIVATIONS, GRADIENTS, TEMPORARY = "activations", "gradients", "temporary"


@dataclass(frozen=True)
class StepTrace:
    """FLOPs of a micro-batch, and its bytes beyond weights, gradients that are kept, and optimizer states."""

    flops: int  # of matmuls and attention, as if nothing were masked
    peaks: dict[str, dict[str, int]]  # by phase and part, at the peak of the phase
    operations: int

    def beyond(self, other: "StepTrace", factor: float) -> "StepTrace":
        """Extrapolate the line from the other trace to this one by `factor` times their distance."""

        def further(end: int, start: int) -> int:
            return max(0, round(end + factor * (end - start)))

        peaks = {
            phase: {part: further(size, other.peaks[phase][part]) for part, size in parts.items()}
            for phase, parts in self.peaks.items()
        }
        return StepTrace(further(self.flops, other.flops), peaks, self.operations)


class TooManyOperations(Exception):
    """The step exceeds the maximum number of traced operations."""


def trace_step(
    objective: Objective[Any], examples: int, keeps_gradients: bool, most_operations: float = math.inf
) -> StepTrace:
    """Trace a forward and backward of `examples`; `objective` was built on the meta device and cannot be used again.

    `keeps_gradients`: they exist during the forward already, from the previous micro-batch or on several ranks, and are
    not counted here.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = objective.model.to_empty(device=CPU)
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p in parameters:
            p.grad = torch.empty_like(p) if keeps_gradients else None
        known = [*model.parameters(), *model.buffers(), *(p.grad for p in parameters)]
        with _StepLog(known, FORWARD, most_operations) as log:
            loss = objective.loss(objective.synthetic_batch(examples, CPU))
            log.mark_alive(ACTIVATIONS)
            log.phase = BACKWARD
            loss.backward()
            log.mark((p.grad for p in parameters), GRADIENTS)
    return StepTrace(log.flops, log.peaks(), log.operations)


def trace_update(objective: Objective[Any]) -> int:
    """Return the peak bytes of an optimizer step besides weights, gradients and states.

    `objective` was built on the meta device and cannot be used again.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = objective.model.to_empty(device=CPU)
        for p in model.parameters():
            p.grad = torch.empty_like(p) if p.requires_grad else None
        optimizers = Optimizers(objective.parameter_groups())
        optimizers.step()  # the first step creates the states
        known = [*model.parameters(), *(p.grad for p in model.parameters()), *optimizers.state().values()]
        with _StepLog(known, UPDATE) as log:
            optimizers.step()
            objective.after_step(0)
    return sum(log.peaks()[UPDATE].values())


@dataclass
class _Storage:
    size: int
    part: str = TEMPORARY


class _StepLog(TorchDispatchMode):
    """Logs FLOPs, and when storages of operations' results are allocated and freed; `known` ones are not counted.

    One mode for both: on fake tensors each mode takes as long as the operation itself.
    """

    def __init__(self, known: Iterable[Tensor | None], phase: str, most_operations: float = math.inf) -> None:
        super().__init__()
        self.phase, self.flops, self.operations, self._most_operations = phase, 0, 0, most_operations
        self._formulas = FlopCounterMode(display=False, custom_mapping=_COUNTED).flop_registry
        self._known = [x.untyped_storage() for x in known if x is not None]  # referenced, so that no address is reused
        self._ignored = {storage._cdata for storage in self._known}
        self._alive: dict[int, tuple[_Storage, Any]] = {}
        self._events: list[tuple[_Storage, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations > self._most_operations:
            raise TooManyOperations
        given = kwargs or {}
        out = func(*args, **given)
        if func is _DEVICE:  # half of all operations ask where a tensor is
            return out
        if formula := self._formulas.get(func.overloadpacket):
            self.flops += int(formula(*args, **given, out_val=out))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._see(x)
        return out

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive and key not in self._ignored:
            made = _Storage(storage.nbytes())
            self._events.append((made, made.size, self.phase))
            self._alive[key] = made, weakref.ref(storage, lambda _: self._free(key))

    def _free(self, key: int) -> None:
        made, _ = self._alive.pop(key)
        self._events.append((made, -made.size, self.phase))

    def mark(self, tensors: Iterable[Tensor | None], part: str) -> None:
        for x in tensors:
            key = None if x is None else x.untyped_storage()._cdata
            if key in self._alive:
                self._alive[key][0].part = part

    def mark_alive(self, part: str) -> None:
        for made, _ in self._alive.values():
            made.part = part

    def peaks(self) -> dict[str, dict[str, int]]:
        """Return the bytes by phase and part, at the peak of each phase."""
        held = dict.fromkeys(PARTS, 0)
        peaks = {phase: dict(held) for phase in (FORWARD, BACKWARD, UPDATE)}
        for made, change, phase in self._events:
            held[made.part] += change
            if sum(held.values()) > sum(peaks[phase].values()):
                peaks[phase] = dict(held)
        return peaks


def _added_product(self_shape: Any, a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def _attention_backward(_: Any, q_BHTD: Any, k_BHSD: Any, *__: Any, **___: Any) -> int:
    """Count four matmuls; the kernel's fifth recomputes a result of the forward, which is not work of the model."""
    B, H, T, D = q_BHTD
    return int(4 * 2 * B * H * T * k_BHSD[2] * D)


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_COUNTED = {
    _aten.addmm_: _added_product,  # torch's registry has only its other forms
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
