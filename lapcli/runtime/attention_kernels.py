"""The order in which a run prefers torch's attention kernels, and a benchmark of them on this machine.

torch uses the first kernel of its priority order that supports the inputs, and the same kernel for the backward pass,
since each saves its own statistics of the forward. From Hopper on (capability 9 and later) cuDNN is preferred to flash:
it is written for these architectures, torch's flash kernel for the one before. cuDNN has no deterministic backward, so
`train.deterministic` keeps torch's order. Inputs that cuDNN does not support (masks with gradients, dtypes other than
bf16 and half) fall through to the next kernel.

`time_attention_kernels` measures flash and cuDNN on a GPU; `lap doctor` shows both.
"""

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.nn.attention import SDPBackend

HOPPER = 9


def attention_order(capability: tuple[int, int] | None, deterministic: bool) -> "list[SDPBackend] | None":
    """Return the kernels in order of preference, or None for torch's own order. `capability` is None without CUDA."""
    from torch.nn.attention import SDPBackend

    if capability is None or capability[0] < HOPPER or deterministic:
        return None
    return [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]


def prefer_attention_kernels(
    device: "torch.device", deterministic: bool = False
) -> contextlib.AbstractContextManager[object]:
    """Provide a context in which attention runs on the first kernel of `attention_order` that supports the inputs.

    Compiled code chooses its kernel when it is compiled, so that has to happen inside the context too.
    """
    import torch
    from torch.nn.attention import sdpa_kernel

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    order = attention_order(capability, deterministic)
    return contextlib.nullcontext() if order is None else sdpa_kernel(order, set_priority=True)


def time_attention_kernels(
    device: "torch.device", batch: int = 8, heads: int = 10, tokens: int = 2048, size: int = 128, rounds: int = 5
) -> dict[str, float | None]:
    """Measure the seconds of causal attention, forward and backward in bf16, with `flash` and with `cudnn`.

    Each is the fastest of several rounds; None if the kernel does not support the shape on this device. The default
    sizes are those of the paper's GPT.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, gradient = (torch.randn(batch, heads, tokens, size, device=device).bfloat16() for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, inputs, gradient)

    seconds: dict[str, float | None] = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                # One more than asked for: the first round warms up, and the minimum drops it.
                seconds[name] = min(_seconds(step, device) for _ in range(rounds + 1))
            except RuntimeError:  # torch has no such kernel for this device or shape
                seconds[name] = None
    return seconds


def _seconds(run: Callable[[], None], device: "torch.device") -> float:
    import torch

    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    started = time.perf_counter()
    run()
    finish()
    return time.perf_counter() - started
