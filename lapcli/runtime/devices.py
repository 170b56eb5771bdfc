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
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lapcli.runtime.errors import LapError

if TYPE_CHECKING:
    import torch

#: Of each GPU, a second: FLOPs in bf16 (dense: data sheets often quote twice as much, with sparsity), FLOPs in float32
#: without TF32, bytes of its memory, and bytes in each direction between GPUs of a machine: NVLink, or PCIe without it
#: (NVLink bridges are not assumed).
PEAKS: dict[str, tuple[float, float | None, float, float]] = {
    "B200": (2250e12, None, 8e12, 900e9),
    "H200": (989e12, None, 4.8e12, 450e9),
    # More specific names first: `_listed` takes the first that matches.
    "H100 PCIe": (756e12, None, 2e12, 64e9),
    "H100 NVL": (835e12, None, 3.9e12, 64e9),
    "H100": (989e12, 67e12, 3.35e12, 450e9),
    "A100": (312e12, 19.5e12, 2.039e12, 300e9),
    "L40S": (362e12, None, 864e9, 32e9),
    "L40": (181e12, 90.5e12, 864e9, 32e9),
    "A40": (150e12, None, 696e9, 32e9),
    "RTX 4090": (165e12, None, 1008e9, 32e9),
    "RTX 3090": (71e12, None, 936e9, 32e9),
}

#: Suffixes that name another, slower or faster, GPU of the same number.
_OTHER_MODELS = {"laptop", "max-q", "ti", "super", "d"}
CUBLAS, INDUCTOR = "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"
_WORKSPACES = (":4096:8", ":16:8")  # with any other setting cuBLAS may sum in any order


@dataclass(frozen=True)
class ComputePolicy:
    """How a run computes, decided once from its recipe and its device.

    Code that differs between devices asks this, not the device of its tensors, so that a test without a GPU can take
    CUDA's code path with tensors on the meta device.
    """

    device_type: str  # cpu, cuda or mps
    bf16: bool = False  # matrix products and attention; weights and sums stay float32
    compiles: bool = False
    coarse: bool = False  # losses use few large chunks instead of cache-sized ones: `lap plan` traces every chunk

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context for models that are not ours, which do not set their dtypes themselves."""
        import torch

        return torch.autocast(self.device_type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()


def compute_policy(
    device: "torch.device", precision: str = "auto", compiles: Literal["auto"] | bool = False
) -> ComputePolicy:
    """Resolve a recipe's `train.precision` and `train.compile` for a device of this machine."""
    import torch

    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    policy = Device(device.type, device.type, None, native_bf16=native).policy(precision, compiles)
    if policy.bf16 and device.type == "cpu":
        check_bf16_of_cpu()
    return policy


#: Virtual machines pass the processor's flags on; some name AMX and do not run it, and a bf16 product ends the process.
NO_AMX = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16: this machine reports instructions (mostly AMX) that it does not have"
_BF16_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


# Once per process: the trial imports torch, which takes seconds.
@cache
def check_bf16_of_cpu(flags: Path = Path("/proc/cpuinfo"), program: str = _BF16_PRODUCT) -> None:
    """Try a product in a process of its own where AMX is reported: in ours it might end the run without a message."""
    try:
        is_suspect = "amx_bf16" in flags.read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ
    except OSError:
        return
    if is_suspect and subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGILL:
        raise LapError(f"bf16 products end the process here; {NO_AMX}, or use --set train.precision=float32")


def to_device(tensors: "Iterable[torch.Tensor]", device: "torch.device") -> "list[torch.Tensor]":
    """Copy tensors from the CPU; through pinned memory to CUDA, so that the copy overlaps with the GPU's work."""
    pinned = [x.pin_memory() if device.type == "cuda" else x for x in tensors]
    return [x.to(device, non_blocking=True) for x in pinned]


def has_float64(device: "torch.device") -> bool:
    """Return whether the device has float64; Apple GPUs do not."""
    return device.type != "mps"


def use_whole_float32() -> None:
    """Turn TF32 off, so that float32 is float32 on every GPU.

    torch enables it for convolutions, and NVIDIA's containers turn it on for matrix products through an environment
    variable. It keeps 10 bits of the mantissa: too few for Newton-Schulz on a Gram matrix and for measurements.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def peak_flops(device_name: str) -> float | None:
    """Return the peak in bf16, or None if it is not known (a CPU, an unlisted GPU)."""
    peaks = _listed(device_name)
    return None if peaks is None else peaks[0]


def _listed(device_name: str) -> tuple[float, float | None, float, float] | None:
    """Return the first peaks whose name is in the device's as whole words: an "RTX A4000" is not an "A40"."""
    if _OTHER_MODELS & set(device_name.lower().split()):
        return None
    names = (name for name in PEAKS if re.search(rf"\b{re.escape(name)}\b", device_name, re.IGNORECASE))
    return PEAKS.get(next(names, ""))


@dataclass(frozen=True)
class Device:
    """One of the devices that a run is planned for."""

    name: str
    type: str  # cpu, cuda or mps
    memory: int | None  # bytes
    bf16_flops: float | None = None  # a second, at best
    float32_flops: float | None = None
    native_bf16: bool = True  # of a GPU: not emulated

    @property
    def usable(self) -> int | None:
        """Bytes that a process can allocate. On a GPU, CUDA and its libraries take a gigabyte, and a fiftieth of the
        rest is lost to fragmentation."""
        if self.memory is None:
            return None
        return int((self.memory - 10**9) * 0.98) if self.type == "cuda" else self.memory

    def policy(self, precision: str, compiles: Literal["auto"] | bool) -> ComputePolicy:
        """Return how a run computes on this device; `compiles: auto` compiles only on CUDA.

        `precision: auto` is bf16 on GPUs that have it in hardware; those before Ampere (a T4) emulate it, at a fraction
        of their float32 speed.
        """
        bf16 = precision == "bf16" or (precision == "auto" and self.type == "cuda" and self.native_bf16)
        return ComputePolicy(self.type, bf16, compiles is True or (compiles == "auto" and self.type == "cuda"))

    def peak(self, bf16: bool) -> float | None:
        return self.bf16_flops if bf16 else self.float32_flops

    @property
    def bandwidths(self) -> tuple[float, float] | None:
        """Bytes per second of its memory and between two such devices; None if they are not known."""
        peaks = _listed(self.name) if self.type == "cuda" else None
        return None if peaks is None else peaks[2:]


#: By the names that `lap plan --gpu` takes.
GPUS = {
    "l40": Device("L40", "cuda", 46_068 * 2**20, *PEAKS["L40"][:2]),
    "h100": Device("H100", "cuda", 81_559 * 2**20, *PEAKS["H100"][:2]),
    "a100": Device("A100 80GB", "cuda", 81_920 * 2**20, *PEAKS["A100"][:2]),
}


def this_cpu() -> Device:
    """Return this machine's CPU with all of its memory, whatever other programs hold of it."""
    return Device("CPU", "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def this_device(type_: str) -> Device:
    """Return the device of that type that a run would use on this machine."""
    if type_ == "cuda":
        import torch

        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        bf16_flops, float32_flops, *_ = _listed(name) or (None, None)
        return Device(name, "cuda", memory, bf16_flops, float32_flops, native)
    return this_cpu() if type_ == "cpu" else Device(type_, type_, None)


def peak_memory() -> int:
    """Return the most bytes that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def prepare_determinism() -> None:
    """Set the variables that cuBLAS and Inductor read once, for this process and its children; before CUDA starts."""
    is_late = os.environ.get(CUBLAS) not in _WORKSPACES
    if is_late and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise LapError(
            f"train.deterministic needs {CUBLAS}={_WORKSPACES[0]} before CUDA starts, and CUDA has started in this "
            "process; set it in the environment, or train in a new process"
        )
    if is_late:
        os.environ[CUBLAS] = _WORKSPACES[0]
    os.environ[INDUCTOR] = "1"  # no choice of kernels by timing


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic algorithms if `wanted`; an operation without one fails. The exit restores the settings.

    Not `warn_only`: with it flash attention stays nondeterministic. Uninitialized memory is not filled: a run that read
    it would be wrong whatever it held.
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
    flash, which is written for the architecture before. cuDNN has no deterministic backward, so a deterministic run
    keeps torch's order; so does every other device. Compiled code chooses its kernel when it is compiled, which has to
    happen inside the context too.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if deterministic or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return contextlib.nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
