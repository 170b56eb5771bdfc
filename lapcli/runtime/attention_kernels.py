"""The order in which a run prefers torch's attention kernels.

torch uses the first kernel of its priority order that supports the inputs, and the same kernel for the backward pass,
since each saves its own statistics of the forward. From Hopper on (capability 9 and later) cuDNN is preferred to flash:
it is written for these architectures, torch's flash kernel for the one before. cuDNN has no deterministic backward, so
`train.deterministic` keeps torch's order. Inputs that cuDNN does not support (masks with gradients, dtypes other than
bf16 and half) fall through to the next kernel.
"""

import contextlib
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
