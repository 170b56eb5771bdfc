"""Precision by device, and GPUs by their driver names; a GPU is imitated by torch's description of it."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import HANG, run_process, tiny_recipe, write_text
from torch.nn.attention import SDPBackend

from lapcli.planning import plan_training
from lapcli.runtime.devices import (
    compute_policy,
    listed,
    prefer_attention_kernels,
    this_device,
)


def use_gpu(monkeypatch: pytest.MonkeyPatch, name: str, major: int) -> None:
    properties = SimpleNamespace(name=name, major=major, minor=0, total_memory=40 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A40", 150e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_names_match_by_complete_words(name: str, tflops: float | None) -> None:
    gpu = listed(name)
    assert (gpu and gpu.bf16_flops) == tflops


@pytest.mark.parametrize(("name", "major", "native"), [("Tesla T4", 7, False), ("NVIDIA A100-SXM4-80GB", 8, True)])
def test_auto_is_bf16_on_hardware_that_supports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path, name: str, major: int, native: bool
) -> None:
    """Both in a run and in its plan."""
    with monkeypatch.context() as gpu:
        use_gpu(gpu, name, major)
        cuda, device = torch.device("cuda"), this_device("cuda")
        assert compute_policy(cuda, "auto").bf16 is native
        assert compute_policy(cuda, "bf16").bf16
        assert not compute_policy(cuda, "float32").bf16
    recipe = tiny_recipe(write_text(tmp_path / "text.txt"))
    assert plan_training(recipe, device=device).precision == ("bf16" if native else "float32")


def test_tf32_is_off_in_any_environment() -> None:
    """NVIDIA's containers set the variable; torch itself enables TF32 in convolutions."""
    script = """
import torch
import torch.nn.functional as F
from lapcli.runtime.ranks import pick_device
before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
pick_device("cpu")
print(*before, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
"""
    surroundings = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    out = run_process([sys.executable, "-c", script], env=surroundings, capture_output=True, text=True, timeout=HANG)
    assert out.stdout.split() == ["True", "True", "False", "False"], out.stderr


def test_cudnn_is_preferred_since_hopper(monkeypatch) -> None:
    """A CPU has no cuDNN: the next backend is used, with the same result."""
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    usual = torch._C._get_sdp_priority_order()
    for major, deterministic, is_preferred in (
        (9, False, True),
        (12, False, True),
        (9, True, False),
        (8, False, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        with prefer_attention_kernels(torch.device("cuda", 0), deterministic):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), plain)
            assert (torch._C._get_sdp_priority_order() != usual) == is_preferred
            if is_preferred:
                assert torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value
