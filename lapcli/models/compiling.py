"""Compiling for training; which runs compile their model is part of `ComputePolicy` in runtime/devices.py.

A complete model is compiled once per shape in training and validation, so a run has two or three graphs. With
torch.compile's defaults there would be more of them, and slower ones:

- After a batch of another size it compiles for dynamic sizes, then trains on that slower graph. So shapes are fixed,
  and a short last batch of a validation is padded (`pad_rows`).
- It counts the graphs of all models of one class together, and of all blocks if each is compiled on its own; a plan
  that varies by layer makes each block another graph. Beyond `recompile_limit` it runs uncompiled, and only its log
  says so. So each model has its own count, in which all of its layers are one graph.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

#: Options of torch.compile, and of a module's `compile`.
OPTIONS: dict[str, Any] = {"dynamic": False, "isolate_recompiles": True}


def compiled(function: Callable[Arguments, Result], *, any_length: bool = False) -> Callable[Arguments, Result]:
    """Compile a function; `any_length`: one graph for all shapes, for batches whose shapes all differ."""
    return torch.compile(function, **{**OPTIONS, "dynamic": any_length})


@functools.cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once per process: for losses, which all models share."""
    return compiled(function)


def pad_rows(x: Tensor, rows: int, value: float = 0) -> Tensor:
    """Pad `x` with rows of `value` to the common number of rows."""
    if len(x) == rows:
        return x
    return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), value)])
