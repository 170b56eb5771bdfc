"""What can be counted of GPU code without a GPU: waits of the host, bytes of eager and of compiled code, graphs.

    with HostWaits(device) as waits: ...       places where the host waits for the device
    with Traffic() as traffic: ...             bytes that eager operations read and write
    compiled_bytes(run)                        bytes that the kernels of compiled code read and write
    torch.compile(..., backend=Graphs())       graphs that were compiled

On CUDA waits are those that CUDA itself names. Elsewhere they are told by the operation: a number leaves a tensor, a
result has a size that depends on values, a copy from or to the host is not asynchronous. A step on the meta device has
the device apart from the host, so there all of that is seen; on the CPU both are one, and copies are not.

Bytes are those of tensors, each read once and written once by an operation; what a cache spares is not known. Products
of matrices are left out: their time is that of their FLOPs.
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
_LEAVING = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__}  # without an operation, from the CPU
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
_ALLOCATING = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "device",
}  # fake ones are asked
_FILLING = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"}
_PICKING = {"index", "index_select", "gather", "embedding"}


class HostWaits:
    """Names each place where the host waits for `device`, in `places`.

    The meta device holds no numbers: whatever is asked of it there is 1.
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
    places += [str(entry.message) for entry in caught if "synchroniz" in str(entry.message)]


class _Calls(TorchFunctionMode):
    """What no operation tells: on the CPU numbers are read from memory, and a tensor is filled on the host."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, given = self._waits, kwargs or {}
        is_meta = waits.device.type == "meta"
        if func in _MAKING and is_meta and torch.device(given.get("device") or "cpu") == waits.device:
            waits.places.append(f"{func.__name__} on the device")
        elif args and waits.is_here(args[0]):
            if func in _LEAVING:
                waits.places.append(func.__name__)
                if is_meta:
                    return _ones(args[0]) if func is Tensor.tolist else torch.ones(args[0].shape, dtype=args[0].dtype)
            elif func in _NUMBERS and is_meta:
                waits.places.append(func.__name__)
                return _NUMBERS[func]()
        return func(*args, **given)


def _ones(x: Tensor) -> Any:
    return torch.ones(x.shape, dtype=x.dtype).tolist()


class _Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self._is_wait(func, args, given):
            self._waits.places.append(str(func))
        return func(*args, **given)

    def _is_wait(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in tensors if self._waits.is_here(x)]
        if func in _COPYING:
            target = args[0].device if func is aten.copy_.default else kwargs.get("device") or args[0].device
            source = args[1].device if func is aten.copy_.default else args[0].device
            is_blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            return target != source and is_blocking and self._waits.device.type in {target.type, source.type}
        if func in _INDEXING and here:
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            return any(x.dtype in {torch.bool, torch.uint8} or not self._waits.is_here(x) for x in indices)
        return bool(here) and func in _WAITING


class Traffic(TorchDispatchMode):
    """Bytes that eager operations read and write, by the name of the operation in `by_operation`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return self.by_operation.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = func._schema.name.partition("::")[2]
        if name.strip("_") not in _PRODUCTS and name not in _ALLOCATING and not func.is_view:
            self.by_operation[name] += _operation_bytes(func, name, args, given, result)
        return result


def _operation_bytes(func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Inputs are read, results written; what is changed in place is both, `out` is written alone. Of what rows or
    elements are picked from, as much is read as is picked."""
    results = sum(_extent(x) for x in tree_leaves(result) if isinstance(x, Tensor))
    if name in _FILLING:
        return results
    if name in _PICKING:
        return 2 * results
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
    written += sum(_extent(x) for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in seen)
    return read + written


def _extent(x: Tensor) -> int:
    """Bytes of the different elements: those of an expanded dimension are one."""
    count = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return 0 if not x.numel() else count * x.element_size()


class Graphs(list[torch.fx.GraphModule]):
    """A backend of torch.compile that keeps the graphs that it is given and runs them as they are."""

    def __init__(self) -> None:
        self.symbolic: list[Any] = []  # sizes that a graph takes as they come

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.append(graph)
        sizes = [size for x in inputs for size in (x.shape if isinstance(x, Tensor) else [x])]
        self.symbolic += [size for size in sizes if isinstance(size, torch.SymInt)]
        return graph.forward


def compiled_bytes(run: Callable[[], object]) -> int:
    """Bytes that the kernels compiled during `run` read and write, by Inductor's own count, each kernel run once.

    Counted for the device of the tensors: on the CPU it stands for what Triton would fuse. There Inductor keeps in
    memory what several kernels use of exp, tanh or sigmoid, which it computes again on a GPU; exp2 is left alone.
    """
    from torch._functorch import config as autograd_config
    from torch._inductor import config, metrics

    def is_shown(record: logging.LogRecord) -> bool:
        return False

    torch.compiler.reset()
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)  # which counts; the lines themselves are of no use here
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.addFilter(is_shown)
    try:
        with config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
            run()
    finally:
        log.removeFilter(is_shown)
        torch._logging.set_logs()
    return int(metrics.num_bytes_accessed)
