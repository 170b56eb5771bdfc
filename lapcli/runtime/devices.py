"""What devices can do at best, from the vendors' data sheets: dense FLOP/s of their tensor cores in bf16, FLOP/s of
plain float32, and memory."""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """Of one device, None where it is not known (a CPU, an unlisted GPU)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device_name.lower()), None)


@dataclass(frozen=True)
class Device:
    """One of the devices that a run is planned for."""

    name: str
    type: str  # cpu, cuda or mps
    memory: int | None  # bytes
    bf16_flops: float | None = None  # a second, at best
    float32_flops: float | None = None

    @property
    def usable(self) -> int | None:
        """What a process can allocate. A GPU gives up a gigabyte to CUDA and its libraries, and a fiftieth of the
        rest lies unused between blocks of other sizes."""
        if self.memory is None:
            return None
        return int((self.memory - 10**9) * 0.98) if self.type == "cuda" else self.memory

    def peak(self, bf16: bool) -> float | None:
        return self.bf16_flops if bf16 else self.float32_flops


#: By the names that `lap plan --gpu` takes. float32 is without TF32, which torch does not use by itself.
GPUS = {
    "l40": Device("L40", "cuda", 46_068 * 2**20, 181e12, 90.5e12),
    "h100": Device("H100", "cuda", 81_559 * 2**20, 989e12, 67e12),
    "a100": Device("A100 80GB", "cuda", 81_920 * 2**20, 312e12, 19.5e12),
}


def this_cpu() -> Device:
    """All of the machine's memory; what other programs hold is not known here."""
    return Device("CPU", "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def this_device(type_: str) -> Device:
    """What a run would use on this machine."""
    if type_ == "cuda":
        import torch

        name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
        known = next((gpu for gpu in GPUS.values() if gpu.name.split()[0].lower() in name.lower().split()), None)
        return Device(name, "cuda", memory, peak_flops(name), known.float32_flops if known else None)
    return this_cpu() if type_ == "cpu" else Device(type_, type_, None)


def resident_memory() -> int:
    """Bytes that this process holds now; where the system does not say, the most it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory()


def peak_memory() -> int:
    """The most bytes that this process ever held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
