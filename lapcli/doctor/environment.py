"""The machine around a run: GPU and driver, compiler, locks, disk."""

import fcntl
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lapcli.doctor.checks import Check, Finding, fails, passes, warns
from lapcli.runtime.environment import cache_dir, check_compiler, runs_dir
from lapcli.runtime.errors import UsageError

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """The GPUs of a machine according to torch and the driver; they are assumed to be alike."""

    count: int
    name: str = ""
    native_bf16: bool = False
    driver: str | None = None


def this_gpu() -> Gpu:
    driver = None
    # Not from torch: a driver that torch cannot use has to be noticed too.
    if DRIVER_FILE.exists():
        match = re.search(r"Kernel Module\D*([\d.]+)", DRIVER_FILE.read_text())
        driver = match.group(1) if match else "unknown"
    if not torch.cuda.is_available():
        return Gpu(0, driver=driver)
    # By default torch also says True where bf16 is only emulated, as on a T4.
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(torch.cuda.device_count(), torch.cuda.get_device_name(0), bf16, driver)


def check_gpu(gpu: Gpu) -> Finding:
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, driver {gpu.driver or 'none'}"
    if not gpu.count and gpu.driver is not None:
        return fails(
            f"the machine has an NVIDIA driver, but torch sees no GPU; {versions}",
            "check CUDA_VISIBLE_DEVICES and nvidia-smi, and install a torch for a CUDA that the driver supports",
        )
    if not gpu.count:
        return warns(f"no GPU: runs compute on the CPU; {versions}", "no action is needed if this is intended", gpus=0)
    if not gpu.native_bf16:
        return warns(
            f"{gpu.count} x {gpu.name} only emulates bf16, so runs compute in float32; {versions}",
            "plan with `lap plan RECIPE`, and lower train.micro_batch if it does not fit",
            gpus=gpu.count,
        )
    return passes(f"{gpu.count} x {gpu.name}; {versions}", gpus=gpu.count)


def check_compiling(device_type: str) -> Finding:
    try:
        check_compiler(device_type)
    except UsageError as error:
        step = "follow this message" if device_type == "cuda" else "nothing: on the CPU no run compiles by default"
        return (fails if device_type == "cuda" else warns)(str(error), step)
    return passes("torch.compile finds what it needs")


def check_disk(folder: Path) -> Finding:
    place = _existing(folder)
    left = shutil.disk_usage(place).free
    text = f"{left / 1e9:.1f} GB free in {place}"
    # A run of the 561M GPT keeps three checkpoints of 5.4 GB.
    step = "set LAP_RUNS to a larger disk; `lap plan` says what a run needs"
    return passes(text) if left >= 20 * 10**9 else warns(text, step)


def check_locks(variable: str, folder: Path, lock: Callable[[Any, int], object] = fcntl.flock) -> Finding:
    """Take a lock in the folder twice; the second attempt has to be refused."""
    place, step = _existing(folder), f"set {variable} to another disk"
    try:
        with tempfile.NamedTemporaryFile(prefix=".lap-doctor-", dir=place) as file, open(file.name, "rb") as again:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock belongs to an open file, so a second open of it is refused like another process.
            lock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return passes(f"{variable}: they work in {place}")
    except OSError as error:
        return fails(f"{variable}: no locks in {place} ({error.strerror}), so two processes can work on one run", step)
    return fails(f"{variable}: {place} grants one lock twice, so two processes would write the same run", step)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it: a check creates none."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def environment_checks(gpu: Gpu) -> list[Check]:
    named: dict[str, Callable[[], Finding]] = {
        "GPU": partial(check_gpu, gpu),
        "compiler": partial(check_compiling, "cuda" if gpu.count else "cpu"),
        "locks of runs": partial(check_locks, "LAP_RUNS", runs_dir()),
        "locks of the cache": partial(check_locks, "LAP_CACHE", cache_dir()),
        "disk": partial(check_disk, runs_dir()),
    }
    return [Check("environment", name, run) for name, run in named.items()]
