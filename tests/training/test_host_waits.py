"""A step of every kind on a device that holds no numbers: whatever would make the host wait for a GPU cannot be done.

The meta device takes the ways of a GPU wherever code asks whether it is on the CPU. Where it asks for more (bf16, the
size of chunks, the precision of Newton-Schulz), the test says what CUDA would say. AdamW is torch's unfused one: the
fused one is not made for this device.
"""

from typing import Any

import pytest
import torch
from kinds_support import KINDS, build_kind
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapcli.models import chunked_loss
from lapcli.objectives.dino import sinkhorn
from lapcli.planning.pretending import autocast
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


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait(kind: str, precision: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in (chunked_loss._CHUNK_ELEMENTS, sinkhorn.CHUNK_ELEMENTS):
        monkeypatch.setitem(sizes, "meta", sizes["cuda"])
    objective = build_kind(kind, tmp_path, World(0, 1, META), precision=precision)
    if hasattr(objective, "_autocast"):  # the meta device has none of its own
        monkeypatch.setattr(objective, "_autocast", lambda: autocast(META, precision == "bf16"))
    if hasattr(objective, "_eraser"):  # draws on the CPU, so that it draws the same on every machine
        monkeypatch.setattr(objective, "_eraser", None)
    groups = objective.parameter_groups()
    for group in groups:
        if group.kind == "muon":
            group.options["dtype"] = torch.bfloat16 if precision == "bf16" else torch.float32
    optimizers = Optimizers(groups)
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
