"""Devices: how a run computes on one, and the peaks of GPUs from the vendors' data sheets.

Where results are bitwise the same, on one machine with the same versions of everything:

    CPU                             always, for the same number of processes and threads
    CUDA                            with train.deterministic, for the same GPUs and number of processes
    another number of processes     the same state and the same global batches; the last bits differ

By default CUDA's attention backward, its embeddings under Inductor and the choice of kernels by timing change the last
bits from one run to the next. The deterministic algorithms are slower.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, cast

from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:
    import torch

#: Suffixes of slower or faster GPUs with the same number.
_OTHER_MODELS = {"laptop", "max-q", "ti", "super", "d"}
CUBLAS, INDUCTOR = "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"
_WORKSPACES = (":4096:8", ":16:8")  # with any other setting cuBLAS may sum in any order


@dataclass(frozen=True)
class ComputePolicy:
    """The compute settings of a run, decided once from its recipe and device.

    Code that differs between devices asks this, not the device of its tensors, so that a test without a GPU can take
    CUDA's code path with tensors on the meta device.
    """

    device_type: str  # cpu, cuda or mps
    bf16: bool = False  # matrix products and attention; weights and sums stay float32
    compiles: bool = False
    coarse: bool = False  # losses use few large chunks instead of cache-sized ones: `lap plan` traces every chunk

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context for foreign models, which do not set their dtypes themselves."""
        import torch

        return torch.autocast(self.device_type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()


def compute_policy(
    device: "torch.device", precision: str = "auto", compiles: Literal["auto"] | bool = False
) -> ComputePolicy:
    """Resolve a recipe's `train.precision` and `train.compile` for a device of this machine."""
    import torch

    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return Device(device.type, device.type, None, native_bf16=native).policy(precision, compiles)


def to_device(tensors: "Iterable[torch.Tensor]", device: "torch.device") -> "list[torch.Tensor]":
    """Copy tensors from the CPU; through pinned memory to CUDA, so that the copy overlaps with the GPU's work."""
    pinned = [x.pin_memory() if device.type == "cuda" else x for x in tensors]
    return [x.to(device, non_blocking=True) for x in pinned]


def has_float64(device: "torch.device") -> bool:
    """Return whether the device has float64; Apple GPUs do not."""
    return device.type != "mps"


def use_whole_float32() -> None:
    """Turn TF32 off, so that float32 is exact on every GPU.

    torch enables it for convolutions, and NVIDIA's containers turn it on for matmuls through an environment
    variable. It keeps 10 bits of the mantissa: too few for Newton-Schulz on a Gram matrix and for measurements.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@dataclass(frozen=True)
class Device:
    """The type of device for which a run is planned."""

    name: str
    type: str  # cpu, cuda or mps
    memory: int | None  # bytes
    bf16_flops: float | None = None  # a second, at best
    float32_flops: float | None = None
    native_bf16: bool = True  # of a GPU: not emulated
    link: float | None = None  # bytes a second in each direction between two of them in one machine

    @property
    def usable(self) -> int | None:
        """Bytes that a process can allocate. On a GPU, CUDA and its libraries take a gigabyte, and a fiftieth of the
        rest is lost to fragmentation."""
        if self.memory is None:
            return None
        return int((self.memory - 10**9) * 0.98) if self.type == "cuda" else self.memory

    def policy(self, precision: str, compiles: Literal["auto"] | bool) -> ComputePolicy:
        """Return how a run computes on this device; `compiles: auto` compiles only on CUDA.

        `precision: auto` is bf16 on GPUs with hardware support; earlier GPUs than Ampere (a T4) emulate it, at a
        fraction of their float32 speed.
        """
        bf16 = precision == "bf16" or (precision == "auto" and self.type == "cuda" and self.native_bf16)
        return ComputePolicy(self.type, bf16, compiles is True or (compiles == "auto" and self.type == "cuda"))

    def peak(self, bf16: bool) -> float | None:
        return self.bf16_flops if bf16 else self.float32_flops


def _gpu(name: str, mebibytes: int, bf16: float, float32: float, link: float, native_bf16: bool = True) -> Device:
    """Return a GPU by its data sheet: TFLOPs per second, GB per second between two of them."""
    return Device(name, "cuda", mebibytes * 2**20, bf16 * 1e12, float32 * 1e12, native_bf16, link * 1e9)


#: Keyed by the names for `--gpu`. Memory as the driver reports it; TFLOPs in bf16 dense (data sheets often quote twice
#: as much, with sparsity) and summed in float32, then in float32 without TF32; the link is NVLink, or PCIe without it.
GPUS = {
    "t4": _gpu("T4", 15_360, 65, 8.1, 16, native_bf16=False),  # in float16, which is not used
    "a10": _gpu("A10", 23_028, 125, 31.2, 32),
    "l4": _gpu("L4", 23_034, 121, 30.3, 32),
    "a40": _gpu("A40", 46_068, 150, 37.4, 32),
    "l40": _gpu("L40", 46_068, 181, 90.5, 32),
    "l40s": _gpu("L40S", 46_068, 362, 91.6, 32),
    "a100": _gpu("A100", 81_920, 312, 19.5, 300),
    "h100-pcie": _gpu("H100 PCIe", 81_559, 756, 51, 64),
    "h100-nvl": _gpu("H100 NVL", 95_830, 835, 60, 64),
    "h100": _gpu("H100", 81_559, 989, 67, 450),
    "h200": _gpu("H200", 143_771, 989, 67, 450),
    "b200": _gpu("B200", 183_359, 2250, 75, 900),
    "3090": _gpu("RTX 3090", 24_576, 71, 35.6, 32),
    "4090": _gpu("RTX 4090", 24_564, 165, 82.6, 32),
    "5090": _gpu("RTX 5090", 32_607, 209, 104.8, 64),
    "a6000": _gpu("RTX A6000", 49_140, 155, 38.7, 32),
    "rtx-6000-ada": _gpu("RTX 6000 Ada", 49_140, 364, 91.1, 32),
}


def named_gpu(name: str) -> Device:
    if name.lower() not in GPUS:
        near = get_close_matches(name.lower(), GPUS, 1)
        hint = f"did you mean {near[0]}? Listed are" if near else "listed are"
        raise UsageError(f"--gpu {name[:40]!r} is not listed; {hint} {', '.join(GPUS)}")
    return GPUS[name.lower()]


def listed(device_name: str) -> Device | None:
    """Return the listed GPU whose name occurs as complete words in the driver's: an "RTX A4000" is not an "A40"."""
    if _OTHER_MODELS & set(device_name.lower().split()):
        return None
    # The longest match: an "H100 PCIe" is not another "H100".
    names = sorted(GPUS.values(), key=lambda gpu: -len(gpu.name))
    found = (gpu for gpu in names if re.search(rf"\b{re.escape(gpu.name)}\b", device_name, re.IGNORECASE))
    return next(found, None)


def this_cpu() -> Device:
    """Return this machine's CPU with its total memory, including what other programs use."""
    return Device("CPU", "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def this_device(type_: str) -> Device:
    """Return this machine's device of that type that a run would use."""
    if type_ == "cuda":
        import torch

        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        known = listed(name) or Device(name, "cuda", None)
        return replace(known, name=name, memory=memory, native_bf16=native)
    return this_cpu() if type_ == "cpu" else Device(type_, type_, None)


def prepare_determinism() -> None:
    """Set the variables that cuBLAS and Inductor read once, for this process and its children; before CUDA starts."""
    if os.environ.get(CUBLAS) not in _WORKSPACES:
        os.environ[CUBLAS] = _WORKSPACES[0]
    os.environ[INDUCTOR] = "1"  # no choice of kernels by timing


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic algorithms if `wanted`; an operation without one fails. The exit restores the settings.

    Not `warn_only`: with it flash attention stays nondeterministic. Uninitialized memory is not filled: a run that
    reads it would be wrong in any case.
    """
    if not wanted:
        yield
        return
    import torch

    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)  # Inductor's setting too
        memory.fill_uninitialized_memory = False
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark = before


def prefer_attention_kernels(
    device: "torch.device", deterministic: bool = False
) -> contextlib.AbstractContextManager[object]:
    """Provide a context in which attention prefers cuDNN's kernel on Hopper and later GPUs (capability 9).

    torch uses the first kernel of its priority order that supports the inputs, also for the backward, and prefers
    flash, which is written for the previous architecture. cuDNN has no deterministic backward, so a deterministic run
    keeps torch's order; so does every other device. Compiled code chooses its kernel when it is compiled, which has to
    happen inside the context too.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if deterministic or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return contextlib.nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
