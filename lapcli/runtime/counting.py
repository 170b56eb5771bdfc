"""Counts about GPU code that need no GPU: waits of the host, bytes moved by eager and by compiled code, graphs.

    with HostWaits(device) as waits: ...       places where the host waits for the device
    with Traffic() as traffic: ...             bytes that eager operations read and write
    compiled_bytes(run)                        bytes that the kernels of compiled code read and write
    torch.compile(..., backend=Graphs())       graphs that were compiled

On CUDA the waits are those that CUDA itself reports. Elsewhere they are inferred from the operation: a number leaves a
tensor, the size of a result depends on values, a copy from or to the host is not asynchronous. On the meta device the
device is distinct from the host, so all three are seen; on the CPU they are the same, and copies are not seen.

Bytes are those of tensors, each read once and written once by an operation; savings by caches are not known. Matrix
products are left out: their time depends on their FLOPs, not on their bytes.
"""

import logging
import math
import warnings
from collections import Counter
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
# On the CPU these dispatch no operation, so they are only seen as calls.
_LEAVING = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__}
_MAKING = {torch.tensor, torch.as_tensor}
_NUMBERS: dict[Any, Callable[[], object]] = {
    Tensor.item: lambda: 1.0,
    Tensor.__float__: lambda: 1.0,
    Tensor.__int__: lambda: 1,
    Tensor.__index__: lambda: 1,
    Tensor.__bool__: lambda: True,
}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mv", "dot", "addmv"}
_WRITE_ONLY = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
# They move no bytes. `device` is the query that fake tensors dispatch as an operation.
_ALLOCATING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device"}
_FILLING = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"}
_PICKING = {"index", "index_select", "gather", "embedding"}


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


class Traffic(TorchDispatchMode):
    """Bytes that eager operations read and write, by the name of the operation in `by_operation`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return self.by_operation.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(func, args, kwargs, result)
        return result

    def add(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Add the bytes of an operation that was computed."""
        name = func._schema.name.partition("::")[2]
        # Without underscores: `addmm_` and `_convolution` are the same products.
        if name.strip("_") not in _PRODUCTS and name not in _ALLOCATING and not func.is_view:
            self.by_operation[name] += _operation_bytes(func, name, args, kwargs, result)


def _operation_bytes(func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Count the bytes that an operation reads and writes.

    Inputs are read and results written; a tensor changed in place is both, `out` is only written. Of a tensor that rows
    or elements are gathered from, only as much is read as is gathered.
    """
    results = sum(_extent(x) for x in tree_leaves(result) if isinstance(x, Tensor))
    if name in _FILLING:
        return results
    if name in _PICKING:
        return 2 * results  # what is gathered is read and written; the table itself is not
    read = written = 0
    seen = set()
    for place, declared in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(declared.name)
        size = sum(_extent(x) for x in tree_leaves(value) if isinstance(x, Tensor))
        is_changed = declared.alias_info is not None and declared.alias_info.is_write
        if is_changed:
            written += size
            seen |= {id(x) for x in tree_leaves(value)}
        if not is_changed or not (declared.kwarg_only or name in _WRITE_ONLY):
            read += size
    # An operation in place returns the tensor that it changed, which is counted already.
    written += sum(_extent(x) for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in seen)
    return read + written


def _extent(x: Tensor) -> int:
    """Return the bytes of the distinct elements: an expanded dimension counts once."""
    count = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return 0 if not x.numel() else count * x.element_size()


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
    """Return the bytes that the kernels compiled during `run` read and write, by Inductor's own count, each run once.

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
        # A graph from a cache is not compiled, and its kernels would not be counted.
        with config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
            run()
    finally:
        log.removeFilter(is_shown)
        torch._logging.set_logs()
    return int(metrics.num_bytes_accessed)
