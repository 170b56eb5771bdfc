"""Makes tensors on the meta device take the way through our models that the planned device would take.

The meta device computes shapes and nothing else, which is quick, but where code asks for the device (which kernel of
attention, how large a chunk of the loss, autocast) it would go a way of its own.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapcli.heads import laplacian
from lapcli.models import chunked_loss, dino_vit, gpt, lean
from lapcli.objectives.dino import cross_entropy, sinkhorn

_linear, _conv2d = F.linear, F.conv2d


@contextlib.contextmanager
def pretended(device: str, *, bf16: bool, compiled: bool, whole_loss: bool = False) -> Iterator[None]:
    """Inside, meta tensors are sized as on `device`; compiled code counts as keeping what our lean operations keep.

    Losses that go through their rows in chunks do the first one alone, since all of them use the same memory;
    `whole_loss`: all rows in one chunk, so that FLOPs are counted in full.
    """
    keeps_little = compiled or (device == "cpu" and not bf16)
    with contextlib.ExitStack() as stack:

        def swap(owner: Any, name: Any, value: Any) -> None:
            stack.enter_context(_swapped(owner, name, value))

        swap(F, "scaled_dot_product_attention", _attention)
        if keeps_little:
            swap(gpt, "rms_norm", lambda x: lean._RMSNorm.apply(x))
            swap(dino_vit, "gelu_linear", lambda x, layer: lean._GELULinear.apply(x, layer.weight, layer.bias))
        if compiled or device == "cpu":
            swap(laplacian._FusedOnCPU, "fits", staticmethod(lambda q, k, v: q.shape == k.shape == v.shape))
        for table, default in ((chunked_loss._CHUNK_ELEMENTS, 2**24), (sinkhorn.CHUNK_ELEMENTS, 2**24)):
            elements = 2**62 if whole_loss else table.get(device, default)
            swap(table, "meta", elements)
        # Compiled code works through a chunk without a second one of its size; neither does ours on the CPU.
        blocks = chunked_loss._CHUNK_ELEMENTS["meta"] // 8 if keeps_little and not whole_loss else 2**62
        swap(chunked_loss._BLOCK_ELEMENTS, "meta", blocks)
        if not whole_loss:
            for module, name in ((chunked_loss, "_chunks"), (sinkhorn, "row_chunks"), (cross_entropy, "row_chunks")):
                swap(module, name, _first_of(getattr(module, name)))
        yield


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for a name of a module or class, or for a key of a table, until the end of the block."""
    if isinstance(owner, dict):
        owner[name] = value
        try:
            yield
        finally:
            del owner[name]
        return
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _first_of(chunks: Any) -> Any:
    return lambda *arguments: chunks(*arguments)[:1]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What every device's fused kernel keeps: its inputs, its output and a number for each row."""
    if enable_gqa:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out: Tensor
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out


@contextlib.contextmanager
def autocast(device: torch.device, bf16: bool) -> Iterator[None]:
    """bf16 autocast, which the meta device has not: there, linear layers and convolutions cast what they get."""
    if not bf16:
        yield
    elif device.type != "meta":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        with _swapped(F, "linear", _in_bf16(_linear)), _swapped(F, "conv2d", _in_bf16(_conv2d)):
            yield


def _in_bf16(operation: Any) -> Any:
    def cast(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Any:
        return operation(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16(), *rest)

    return cast
