"""Which of torch's attention kernels a run asks for first, and how long each takes here.

torch takes the first kernel of its order that can do a shape; the backward is by the same one, which keeps its own sums
of the forward. On Hopper (capability 9.x) cuDNN's is asked for before flash: it is written for that architecture, the
flash kernel in torch for the one before. It has no deterministic backward, so `train.deterministic` leaves torch's
order alone. What cuDNN does not take (masks with gradients, other dtypes than bf16 and half) goes to the next in line.

`time_attention_kernels` gives the seconds of flash and of cuDNN on a GPU; `lap doctor` shows both.
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
    """The kernels in the order in which they are asked for; None: torch's own. No capability: not a CUDA device."""
    from torch.nn.attention import SDPBackend

    if capability is None or capability[0] != HOPPER or deterministic:
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
    """Inside, attention is computed by the first kernel of `attention_order` that can; compiled code has to be compiled
    inside as well, which is when it chooses."""
    import torch
    from torch.nn.attention import sdpa_kernel

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    order = attention_order(capability, deterministic)
    return contextlib.nullcontext() if order is None else sdpa_kernel(order, set_priority=True)


def time_attention_kernels(
    device: "torch.device", batch: int = 8, heads: int = 10, tokens: int = 2048, size: int = 128, rounds: int = 5
) -> dict[str, float | None]:
    """Seconds of causal attention forward and backward by `flash` and by `cudnn`, in bf16: the fastest of some rounds.

    None for a kernel that does not take the shape on this device. The sizes are by default those of the paper's GPT.
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
                seconds[name] = min(_seconds(step, device) for _ in range(rounds + 1))
            except RuntimeError:  # no kernel of this kind here
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
