"""A step of every kind on a device that holds no numbers: whatever would make the host wait for a GPU cannot be done.

Tensors are on the meta device, and the policy is that of a CUDA GPU: bf16, Newton-Schulz in bf16, the sizes of chunks.
What torch has for a GPU alone is left out: its autocast needs one, and what it casts is cast here; AdamW is the unfused
one, for torch refuses meta tensors to the fused; pinned memory is CUDA's own.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kinds_support import KINDS, build_kind
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapcli.models.chunked_loss import softcapped_cross_entropy
from lapcli.objectives.dino.losses import sinkhorn_targets
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.ranks import World
from lapcli.training.optimizers import Optimizers

META = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
# Their results have a size that only the device knows.
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.equal.default,
}


class HostWaits(Exception):
    pass


class NoHost(TorchDispatchMode):
    """Refuses numbers that leave the device, sizes that depend on its values, and tensors of the CPU among its own:
    0-dimensional ones break CUDA graphs and fused operations, indices are copied with a wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in tensors if x.device == META]
        if on_device and func in WAITS:
            raise HostWaits(f"{func} makes the host wait")
        if on_device and func not in COPIES and len(on_device) < len(tensors):
            raise HostWaits(f"{func} has tensors of the CPU among those of the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0, 0]),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.argmax(1).unique(),
        lambda x: x * torch.tensor(2.0),
        lambda x: torch._foreach_mul([x, x], torch.tensor(2.0)),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.index_select(0, torch.tensor([0, 1])),
    ],
)
def test_waits_are_refused(operation: Any) -> None:
    with NoHost(), pytest.raises((HostWaits, RuntimeError)):
        operation(torch.zeros(3, 4, device=META))


class CastToBf16(TorchFunctionMode):
    """What autocast does to the operations that it lowers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {F.linear, F.conv2d}:
            args = [x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        return func(*args, **(kwargs or {}))


class CudaPolicy(ComputePolicy):
    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        with CastToBf16() if self.bf16 else contextlib.nullcontext():
            yield


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait(kind: str, precision: str, tmp_path) -> None:
    bf16 = precision == "bf16"
    objective = build_kind(kind, tmp_path, World(0, 1, META), CudaPolicy("cuda", bf16=bf16, native_bf16=bf16))
    optimizers = Optimizers(objective.parameter_groups())
    for step in range(2):  # the second has the states of the first
        with NoHost():
            optimizers.set_learning_rates(objective.learning_rate_multiplier(step))
            optimizers.set_options(step)
            loss = objective.loss(objective.batch(step, 0))
            loss.backward()
            optimizers.step()
            optimizers.zero_grad()
            objective.after_step(step)
        assert loss.device == META
        assert loss.shape == ()
    assert all(state.device == META for name, state in optimizers.state().items() if not name.startswith("step/"))


class Count(TorchDispatchMode):
    """How often one operation runs."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation, self.calls = operation, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is self.operation
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 4), ("cuda", 1)])
def test_chunks_are_those_of_the_policy(device: str, chunks: int) -> None:
    """A GPU wants large kernels; where the tensors are does not matter."""
    policy = ComputePolicy(device)
    x, weight, targets = (torch.zeros(shape, device=META) for shape in [(1024, 8), (16_384, 8), (1024,)])
    with Count(aten.addmm.out) as language:
        softcapped_cross_entropy(x.requires_grad_(), weight, targets.long(), 15.0, policy=policy)
    assert language.calls == chunks
    with Count(aten.add.out) as balanced:
        sinkhorn_targets(torch.zeros(1024, 4096, device=META), 0.05, 1, policy)
    assert balanced.calls == chunks
