"""A step of every kind on the meta device, counting all operations that would make the host wait for a GPU.

Tensors are on the meta device, and the policy is that of a CUDA GPU: bf16, Newton-Schulz in bf16, the sizes of chunks.
GPU-only features of torch are replaced: autocast needs a GPU, so its casts are imitated here; AdamW is not fused,
because fused AdamW refuses meta tensors; and pinned memory needs CUDA.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting_support import HostWaits
from objectives_support import OBJECTIVES, build
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapcli.runs import Run
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World
from lapcli.training.loop import Loop

META = torch.device("meta")
aten = torch.ops.aten


class OneDevice(TorchDispatchMode):
    """Refuses CPU tensors among device tensors: 0-dimensional CPU tensors break CUDA graphs and fused
    operations."""

    COPIES = (aten._to_copy.default, aten.copy_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        assert func in self.COPIES or len(devices) < 2, f"{func} has tensors of the CPU among those of the device"
        return func(*args, **(kwargs or {}))


class CastToBf16(TorchFunctionMode):
    """The casts that autocast applies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {F.linear, F.conv2d}:
            args = [x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        return func(*args, **(kwargs or {}))


class CudaPolicy(ComputePolicy):
    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        with CastToBf16() if self.bf16 else contextlib.nullcontext():
            yield


#: Host syncs of a step, for any number of micro-steps.
MOST_WAITS = 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_number_of_host_syncs_in_a_step(kind: str, precision: str, tmp_path) -> None:
    """The second complete update of the loop, which has the states and tables created by the first."""
    bf16, world = precision == "bf16", World(0, 1, META)
    policy = CudaPolicy("cuda", bf16=bf16)
    objective = build(kind, tmp_path, world, policy, batch=16, micro_batch=4)
    run = Run(tmp_path / "run", objective.recipe, {})
    loop = Loop(objective, objective.recipe, run, world, LogConsole(io.StringIO()))
    with contextlib.closing(objective):
        with HostWaits(META):
            loop._update(0)
        with HostWaits(META) as waits, OneDevice():
            line = loop._update(1)
    assert objective.batches.accumulation == 4
    assert len(waits) <= MOST_WAITS, waits.places
    assert line["step"] == 2
    states = loop.optimizers.state()
    assert all(state.device == META for name, state in states.items() if not name.startswith("step/"))
