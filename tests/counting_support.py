"""Counts about GPU code that need no GPU: host syncs, bytes moved by compiled code, graphs.

    with HostWaits(device) as waits: ...       places where the host waits for the device
    compiled_bytes(run)                        bytes that the kernels of compiled code read and write
    torch.compile(..., backend=Graphs())       graphs that were compiled

On CUDA the waits are those that CUDA itself reports. Elsewhere they are inferred from the operation: a number leaves a
tensor, the size of a result depends on values, a copy from or to the host is synchronous. On the meta device the
device is distinct from the host, so all three are detected; on the CPU they are the same, and copies are not detected.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# A number leaves the device, or the result has a size that only the device knows.
_WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.equal.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_COPYING = {aten._to_copy.default, aten.copy_.default}
# On the CPU these dispatch no operation, so only the calls are visible.
_LEAVING = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__}
_MAKING = {torch.tensor, torch.as_tensor}
_NUMBERS: dict[Any, Callable[[], object]] = {
    Tensor.item: lambda: 1.0,
    Tensor.__float__: lambda: 1.0,
    Tensor.__int__: lambda: 1,
    Tensor.__index__: lambda: 1,
    Tensor.__bool__: lambda: True,
}


class HostWaits:
    """Records each place where the host waits for `device`, in `places`.

    The meta device holds no numbers: every number read from it is 1.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.places: list[str] = []
        self._entered = ExitStack()

    def __enter__(self) -> "HostWaits":
        if self.device.type == "cuda":
            self._entered.enter_context(_waits_of_cuda(self.places))
        else:
            self._entered.enter_context(_Calls(self))
            self._entered.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def __len__(self) -> int:
        return len(self.places)

    def is_here(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.device.type == self.device.type


@contextmanager
def _waits_of_cuda(places: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places += [str(entry.message) for entry in caught if "called a synchronizing" in str(entry.message)]


class _Calls(TorchFunctionMode):
    """Waits that dispatch no operation: on the CPU numbers are read from memory, and a tensor is filled on the host."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs = self._waits, kwargs or {}
        is_meta = waits.device.type == "meta"
        if func in _MAKING and is_meta and torch.device(kwargs.get("device") or "cpu") == waits.device:
            waits.places.append(f"{func.__name__} on the device")
        elif args and waits.is_here(args[0]):
            if func in _LEAVING:
                waits.places.append(func.__name__)
                if is_meta:
                    return _ones(args[0]) if func is Tensor.tolist else torch.ones(args[0].shape, dtype=args[0].dtype)
            elif func in _NUMBERS and is_meta:
                waits.places.append(func.__name__)
                return _NUMBERS[func]()
        return func(*args, **kwargs)


def _ones(x: Tensor) -> Any:
    return torch.ones(x.shape, dtype=x.dtype).tolist()


class _Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_wait(func, args, kwargs):
            self._waits.places.append(str(func))
        return func(*args, **kwargs)

    def _is_wait(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in tensors if self._waits.is_here(x)]
        if func in _COPYING:
            target = args[0].device if func is aten.copy_.default else kwargs.get("device") or args[0].device
            source = args[1].device if func is aten.copy_.default else args[0].device
            is_blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            return target != source and is_blocking and self._waits.device.type in {target.type, source.type}
        if func in _INDEXING and on_device:
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            # A mask's true elements have to be counted, and an index on the host has to be copied.
            return any(x.dtype in {torch.bool, torch.uint8} or not self._waits.is_here(x) for x in indices)
        return bool(on_device) and func in _WAITING


class Graphs(list[torch.fx.GraphModule]):
    """A backend of torch.compile that records the graphs and runs them unchanged."""

    def __init__(self) -> None:
        self.symbolic: list[Any] = []  # dynamic sizes among the graphs' inputs

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.append(graph)
        sizes = [size for x in inputs for size in (x.shape if isinstance(x, Tensor) else [x])]
        self.symbolic += [size for size in sizes if isinstance(size, torch.SymInt)]
        return graph.forward


def compiled_bytes(run: Callable[[], object]) -> int:
    """Return the bytes read and written by the kernels compiled during `run`, by Inductor's own count, one run each.

    The count is for the device of the tensors; on the CPU it approximates what Triton would fuse. There Inductor stores
    an exp, tanh or sigmoid that several kernels use, while on a GPU it computes it again; exp2 is not affected.
    """
    from torch._functorch import config as autograd_config
    from torch._inductor import config, metrics

    def is_shown(record: logging.LogRecord) -> bool:
        return False

    torch.compiler.reset()
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)  # turns the counting on; the lines themselves are filtered out
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.addFilter(is_shown)
    try:
        # A cached graph is not compiled, and its kernels would not be counted.
        with config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
            run()
    finally:
        log.removeFilter(is_shown)
        torch._logging.set_logs()
    return int(metrics.num_bytes_accessed)
