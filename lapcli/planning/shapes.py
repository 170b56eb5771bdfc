"""Remembers what operations on the meta device return, so that a second layer like the first costs next to nothing.

Most operations on that device are Python code of a third of a millisecond, and a step of a deep model has thousands;
all but a few were seen in the layer before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

#: From an operation's arguments to its result, without the operation.
Way = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class ShapeMemory:
    def __init__(self) -> None:
        self._ways: dict[Any, Way | None] = {}

    def call(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `operation(*args, **kwargs)` returns."""
        if operation.is_view:  # quick as it is
            return operation(*args, **kwargs)
        key = _key(operation, args, kwargs)
        way = self._ways.get(key)
        if way is not None:
            return way(args, kwargs)
        out = operation(*args, **kwargs)
        if _key(operation, args, kwargs) == key:  # else an argument was given another size
            self._ways[key] = _way_to(out, args, kwargs)
        return out


def _key(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operation, _layout(args), _layout(tuple(kwargs.items()))


def _way_to(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Way | None:
    """A result is the argument that was written to, or new tensors; none where it is neither for certain."""
    given = [x for x in _leaves((args, tuple(kwargs.values()))) if isinstance(x, Tensor)]
    if any(x.device.type != "meta" for x in given):  # what is in them may count
        return None
    if args and out is args[0]:
        return lambda args, _: args[0]
    if out is kwargs.get("out", ()):
        return lambda _, kwargs: kwargs["out"]
    storages = {x.untyped_storage()._cdata for x in given}
    for x in _leaves(out):
        if not isinstance(x, Tensor) or x.device.type != "meta" or x.untyped_storage()._cdata in storages:
            return None
        if x.untyped_storage().nbytes() != _made(_layout(x)).untyped_storage().nbytes():
            return None
    layout = _layout(out)
    return lambda *_: _made(layout)


def _layout(x: Any) -> Any:
    """All that counts of a tensor here; other arguments as they are."""
    if isinstance(x, Tensor):
        return _Layout((x.shape, x.stride(), x.dtype, x.device.type))
    if isinstance(x, tuple | list):
        return tuple(_layout(each) for each in x)
    return x, type(x)  # 1, 1.0 and True are equal, but give different results


class _Layout(tuple):
    """Of one tensor, told apart from a tuple of several."""


def _made(layout: Any) -> Any:
    if isinstance(layout, _Layout):
        shape, stride, dtype, device = layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return tuple(_made(each) for each in layout)


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple | list):
        for each in x:
            yield from _leaves(each)
    else:
        yield x
