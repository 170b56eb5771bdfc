"""Counts the bytes that eager operations read and write, without a GPU.

    with Traffic() as traffic: ...

An operation reads and writes each of its tensors once; caches are ignored. Matmuls
are left out: their time depends on their FLOPs, not on their bytes.
"""

import math
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "mv", "dot", "addmv"}
_WRITE_ONLY = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
# They move no bytes. `device` is the query that fake tensors dispatch as an operation.
_ALLOCATING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device"}
_FILLING = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"}
_PICKING = {"index", "index_select", "gather", "embedding"}


class Traffic(TorchDispatchMode):
    """Bytes that eager operations read and write; `by_operation` lists them by operation name."""

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
        # Without underscores: `addmm_` and `_convolution` are the same matmuls.
        if name.strip("_") not in _PRODUCTS and name not in _ALLOCATING and not func.is_view:
            self.by_operation[name] += _operation_bytes(func, name, args, kwargs, result)


def _operation_bytes(func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Count the bytes that an operation reads and writes.

    Inputs are read and results written; in-place tensors count twice, `out` is only written. A gather reads only
    the rows it selects.
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
    # An in-place operation returns the tensor that it changed, which is already counted.
    written += sum(_extent(x) for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in seen)
    return read + written


def _extent(x: Tensor) -> int:
    """Return the bytes of the distinct elements: an expanded dimension counts once."""
    count = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return 0 if not x.numel() else count * x.element_size()
