"""FLOPs and memory of a training step, traced on the meta device: shapes go through, nothing is computed or allocated.

Memory is a log of which storage lives from when to when; the plan reads off what is alive at the fullest moment.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lapcli.objectives.objective import ParameterGroup
from lapcli.planning.shapes import ShapeMemory
from lapcli.planning.sketch import Sketch
from lapcli.training.muon import Muon

PARTS = ("weights", "gradients", "optimizer", "activations", "loss")
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "lamb": ("exp_avg", "exp_avg_sq")}


def count_flops(sketch: Sketch, examples: int) -> int:
    """Of forward and backward: matrix products and convolutions, two for each multiplication and addition."""
    with FlopCounterMode(display=False, custom_mapping=_COUNTED) as counter:
        sketch.loss(sketch.forward(examples)).backward()
    return int(counter.get_total_flops())


def _added_product(self_shape: Any, a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def _attention_backward(_: Any, q_BHTD: Any, k_BHSD: Any, *__: Any, **___: Any) -> int:
    """Four products; the kernel's fifth recomputes what the forward had, which is no work of the model."""
    B, H, T, D = q_BHTD
    return int(4 * 2 * B * H * T * k_BHSD[2] * D)


_aten = torch.ops.aten
_COUNTED = {
    _aten.addmm_: _added_product,  # torch's registry has it in its other forms alone
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Peak:
    parts: dict[str, int]  # bytes that live at the fullest moment, by what they are
    phase: str  # in which that is: forward, backward or update

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def trace_memory(
    sketch: Sketch, examples: int, shapes: ShapeMemory, *, keeps_gradients: bool, muon_dtype: torch.dtype
) -> Peak:
    """The peak of a training step in the middle of a run: the optimizers have their states.

    `keeps_gradients`: they are there during the forward already, from the micro-batch before or in DDP's buckets.
    """
    log = _Log(shapes)
    parameters = [p for p in sketch.model.parameters() if p.requires_grad]
    with log:
        log.add(sketch.model.parameters(), "weights")
        log.add(sketch.model.buffers(), "activations")
        log.phase = "update"
        for p in parameters:
            p.grad = torch.empty_like(p)
        log.add((p.grad for p in parameters), "gradients")
        log.part = "optimizer"
        states = [_states(group, muon_dtype) for group in sketch.groups]
        for optimizer in states:  # with the states of all of them there; AdamW works in place
            if isinstance(optimizer, Muon):
                optimizer.step()
        sketch.after_step()
        if not keeps_gradients:
            for p in parameters:
                p.grad = None
        log.phase, log.part = "forward", "activations"
        output = sketch.forward(examples)
        log.part = "loss"
        loss = sketch.loss(output)
        del output
        log.phase, log.part = "backward", "activations"
        loss.backward()
        log.add((p.grad for p in parameters if p.grad is not None), "gradients")
    del states
    for p in parameters:
        p.grad = None
    return log.peak()


def _states(group: ParameterGroup, muon_dtype: torch.dtype) -> Any:
    """What the optimizer keeps between updates; of Muon the whole, which has more in the making during one."""
    parameters = list(group.parameters.values())
    if group.kind == "muon":
        options = {**group.options, "dtype": group.options.get("dtype") or muon_dtype}
        optimizer = Muon(parameters, lr=group.lr, **options)
        for p in parameters:
            optimizer.state[p]["momentum"] = torch.empty_like(p)
        return optimizer
    return [torch.empty_like(p) for p in parameters for _ in MOMENTS[group.kind]]


def optimizer_bytes(groups: list[ParameterGroup]) -> int:
    """Of the states, as they are saved."""
    return sum(
        p.numel() * p.element_size() * len(MOMENTS.get(group.kind, ("momentum",)))
        for group in groups
        for p in group.parameters.values()
    )


@dataclass
class _Storage:
    size: int
    part: str
    phase: str


class _Log(TorchDispatchMode):
    """Every storage that an operation makes, with its part, until it is gone."""

    def __init__(self, shapes: ShapeMemory) -> None:
        super().__init__()
        self.part, self.phase = "weights", "update"
        self._shapes = shapes
        self._alive: dict[int, tuple[_Storage, Any]] = {}
        self._events: list[tuple[_Storage, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._shapes.call(func, args, kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._see(x)
        return out

    def add(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Tensors that are known to be of a part, whether they were seen before or not."""
        for x in tensors:
            if x is not None:
                self._see(x).part = part

    def _see(self, x: Tensor) -> _Storage:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            made = _Storage(storage.nbytes(), self.part, self.phase)
            self._events.append((made, made.size, self.phase))
            self._alive[key] = made, weakref.ref(storage, lambda _: self._gone(key))
        return self._alive[key][0]

    def _gone(self, key: int) -> None:
        made, _ = self._alive.pop(key)
        self._events.append((made, -made.size, self.phase))

    def peak(self) -> Peak:
        parts, fullest, most, phase = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0), 0, "update"
        total = 0
        for made, change, when in self._events:
            total += change
            parts[made.part] += change
            if total > most:
                most, fullest, phase = total, dict(parts), when
        return Peak(fullest, phase)
