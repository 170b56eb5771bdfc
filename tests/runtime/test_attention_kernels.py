"""Which attention kernels are asked for; that a GPU has them is for `lap doctor` to say."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapcli.runtime.attention_kernels import attention_order, prefer_attention_kernels

CPU = torch.device("cpu")


def test_cudnn_comes_first_from_hopper_on() -> None:
    for capability in ((9, 0), (10, 0), (12, 0)):
        order = attention_order(capability, deterministic=False)
        assert order is not None
        assert order[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        assert SDPBackend.MATH in order  # whatever the shape, one of them takes it
        assert attention_order(capability, deterministic=True) is None
    for capability in ((7, 5), (8, 0), (8, 9), None):
        assert attention_order(capability, deterministic=False) is None


def test_the_order_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no cuDNN: the next in line takes over, and the result is the same."""
    asked = []

    def recorded(order: list[SDPBackend], set_priority: bool = False):
        asked.append((order, set_priority))
        return sdpa_kernel(order, set_priority)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", recorded)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with prefer_attention_kernels(torch.device("cuda", 0)):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), plain)
    assert asked == [(attention_order((9, 0), False), True)]
    with prefer_attention_kernels(torch.device("cuda", 0), deterministic=True), prefer_attention_kernels(CPU):
        pass
    assert len(asked) == 1
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), plain)
