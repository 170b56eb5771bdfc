"""The machine around a run: GPU and driver, compiler, shared memory, cores, locks, file limit, disk, hub."""

import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import torch

from lapcli.doctor.checks import Check, Finding, fails, passes, warns
from lapcli.runtime.environment import cache_dir, hub_is_offline, runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import Lock, lock_file
from lapcli.runtime.machine import (
    NCCL_BYTES,
    SHARED_MEMORY,
    check_compiler,
    free_shared_memory,
    usable_cores,
)

DRIVER_FILE = Path("/proc/driver/nvidia/version")
#: Cores for each GPU below which a step is likely to wait for the reading of images.
CORES_PER_GPU = 8
FEWEST_FILES, ENOUGH_FILES = 256, 4096
#: A run of the 561M GPT keeps three checkpoints of 5.4 GB.
LEAST_DISK, ENOUGH_DISK = 10**9, 20 * 10**9
SECONDS_FOR_HUB = 5.0


@dataclass(frozen=True)
class Gpu:
    """The GPUs of a machine according to torch and the driver; they are assumed to be alike."""

    count: int
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    native_bf16: bool = False
    architectures: tuple[str, ...] = ()  # that this torch was compiled for
    driver: str | None = None
    cuda: str | None = None  # that this torch was built with


def this_gpu() -> Gpu:
    driver = None
    # Not from torch: a driver that torch cannot use has to be noticed too.
    if DRIVER_FILE.exists():
        match = re.search(r"Kernel Module\D*([\d.]+)", DRIVER_FILE.read_text())
        driver = match.group(1) if match else "unknown"
    if not torch.cuda.is_available():
        return Gpu(0, driver=driver, cuda=torch.version.cuda)
    return Gpu(
        torch.cuda.device_count(),
        torch.cuda.get_device_name(0),
        torch.cuda.get_device_capability(0),
        # By default torch also says True where bf16 is only emulated, as on a T4.
        torch.cuda.is_bf16_supported(including_emulation=False),
        tuple(torch.cuda.get_arch_list()),
        driver,
        torch.version.cuda,
    )


def check_driver(gpu: Gpu) -> Finding:
    versions = f"torch {torch.__version__}, CUDA {gpu.cuda or 'none'}, driver {gpu.driver or 'none'}"
    if gpu.count:
        return passes(f"{gpu.count} x {gpu.name}; {versions}", gpus=gpu.count, driver=gpu.driver, cuda=gpu.cuda)
    if gpu.driver is not None:
        return fails(
            f"the machine has an NVIDIA driver, but torch sees no GPU; {versions}",
            "check CUDA_VISIBLE_DEVICES and nvidia-smi, and install a torch for a CUDA that the driver supports",
            driver=gpu.driver,
        )
    return warns(f"no GPU: runs compute on the CPU; {versions}", "nothing, if this is intended", gpus=0)


def check_capability(gpu: Gpu) -> Finding:
    if not gpu.count:
        return passes("there is no GPU to support")
    major, minor = gpu.capability
    numbers = {"capability": f"{major}.{minor}", "architectures": list(gpu.architectures)}
    codes = [re.match(r"(sm|compute)_(\d+)(\d)([af]?)$", name) for name in gpu.architectures]
    fitting = [code for code in codes if code and _runs_on(code, major, minor)]
    if fitting:
        return passes(f"capability {major}.{minor}, which this torch was compiled for", **numbers)
    return fails(
        f"this torch has no code for capability {major}.{minor}, only for {' '.join(gpu.architectures)}",
        "install a torch for this GPU",
        **numbers,
    )


def _runs_on(code: re.Match[str], major: int, minor: int) -> bool:
    """Return whether code of an architecture runs on a GPU of this capability.

    Machine code (sm_*) runs on the same major version, PTX (compute_*) is translated for any newer one. With the suffix
    a either uses what a single version has, with f what a major version has.
    """
    kind, compiled_for, suffix = code[1], (int(code[2]), int(code[3])), code[4]
    if suffix == "a":
        return compiled_for == (major, minor)
    is_portable = kind == "compute" and not suffix
    return compiled_for <= (major, minor) and (is_portable or compiled_for[0] == major)


def check_bf16(gpu: Gpu) -> Finding:
    if not gpu.count:
        return passes("without a GPU runs compute in float32")
    if gpu.native_bf16:
        return passes("in hardware, so runs compute in it", native_bf16=True)
    return warns(
        "this GPU only emulates bf16, so runs compute in float32 and need about twice the memory",
        "plan with `lap plan RECIPE`, and lower train.micro_batch if it does not fit",
        native_bf16=False,
    )


def check_compiling(device_type: str, check: Callable[[str], None] = check_compiler) -> Finding:
    try:
        check(device_type)
    except UsageError as error:
        step = "follow this message" if device_type == "cuda" else "nothing: on the CPU no run compiles by default"
        return (fails if device_type == "cuda" else warns)(str(error), step)
    return passes("torch.compile finds what it needs")


def check_shared_memory(free: int | None, processes: int) -> Finding:
    needed = processes * NCCL_BYTES
    if free is None:
        return passes(f"there is no {SHARED_MEMORY}; shared memory comes from elsewhere")
    numbers = {"free": free, "needed": needed}
    text = f"{free / 1e9:.2f} GB free in {SHARED_MEMORY}"
    if free < needed:
        return fails(
            f"{text}, and NCCL may need {needed / 1e9:.2f} GB for {processes} processes",
            "make it larger (docker run --shm-size=8g)",
            **numbers,
        )
    if free < 10**9:
        return warns(f"{text}: few workers can read images", "make it larger (docker run --shm-size=8g)", **numbers)
    return passes(text, **numbers)


def check_cores(cores: int, there: int, gpus: int) -> Finding:
    numbers = {"usable": cores, "there": there}
    text = f"{cores} of {there} usable" + (f", {cores / gpus:.3g} for each GPU" if gpus else "")
    if gpus and cores < CORES_PER_GPU * gpus:
        return warns(
            f"{text}: reading images may be slower than the GPUs",
            f"ask the batch system or the container for {CORES_PER_GPU * gpus} cores; GPTs do not need them",
            **numbers,
        )
    return passes(text, **numbers)


def check_locks(variable: str, folder: Path, lock: Callable[[IO[Any]], Lock] = lock_file) -> Finding:
    """Take a lock in the folder twice; the second attempt has to be refused."""
    place = _existing(folder)
    try:
        with tempfile.NamedTemporaryFile(prefix=".lap-doctor-", dir=place) as file, open(file.name, "rb") as again:
            # A lock belongs to an open file, so a second open of it is refused like another process.
            first, second = lock(file), lock(again)
    except OSError as error:
        return fails(
            f"{variable}: {place} cannot be written ({error.strerror})", f"set {variable} to a folder you can write to"
        )
    if first is Lock.UNSUPPORTED:
        return warns(
            f"{variable}: the file system of {place} has no locks, so two processes can work on one run",
            f"set {variable} to another disk, or never start a run twice at the same time",
        )
    if (first, second) == (Lock.HELD, Lock.TAKEN):
        return passes(f"{variable}: they work in {place}")
    return fails(
        f"{variable}: {place} grants one lock twice, so two processes would write the same run",
        f"set {variable} to another disk",
    )


def check_file_limit(limit: int) -> Finding:
    step = f"raise it (ulimit -n {ENOUGH_FILES}) in the shell or job script"
    numbers = {"limit": limit}
    # RLIM_INFINITY is -1, which a comparison would take for too few.
    if limit == resource.RLIM_INFINITY or limit >= ENOUGH_FILES:
        return passes("no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} open files", **numbers)
    if limit < FEWEST_FILES:
        return fails(f"{limit:,} open files are too few for workers that read images", step, **numbers)
    return warns(f"{limit:,} open files, which many workers can use up", step, **numbers)


def check_disk(folder: Path, free: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free) -> Finding:
    place = _existing(folder)
    left = free(place)
    text = f"{left / 1e9:.1f} GB free in {place}"
    step = "set LAP_RUNS to a larger disk; `lap plan` says what a run needs"
    if left < LEAST_DISK:
        return fails(text, step, free=left)
    return passes(text, free=left) if left >= ENOUGH_DISK else warns(text, step, free=left)


def check_hub(is_offline: bool, address: str, connect: Callable[..., Any] = socket.create_connection) -> Finding:
    """Open a connection to the hub and sends nothing."""
    if is_offline:
        return passes("offline, as HF_HUB_OFFLINE says: data and weights come from this machine", offline=True)
    parts = urlsplit(address)
    try:
        connect((parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)), SECONDS_FOR_HUB).close()
    except OSError as error:
        return warns(
            f"{parts.hostname} cannot be reached ({error})",
            "set HF_HUB_OFFLINE=1, and name local files with --data, or fetch them elsewhere with `lap fetch`",
            offline=False,
        )
    return passes(f"{parts.hostname} answers", offline=False)


def hub_address() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it: a check creates none."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def environment_checks(gpu: Gpu, processes: int) -> list[Check]:
    """Return all checks of the environment, for this machine."""
    device_type = "cuda" if gpu.count else "cpu"
    named: dict[str, Callable[[], Finding]] = {
        "driver": lambda: check_driver(gpu),
        "capability": lambda: check_capability(gpu),
        "bf16": lambda: check_bf16(gpu),
        "compiler": lambda: check_compiling(device_type),
        "shared memory": lambda: check_shared_memory(free_shared_memory(), processes),
        "cores": lambda: check_cores(usable_cores(), os.cpu_count() or 1, gpu.count),
        "locks of runs": lambda: check_locks("LAP_RUNS", runs_dir()),
        "locks of the cache": lambda: check_locks("LAP_CACHE", cache_dir()),
        "open files": lambda: check_file_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "disk": lambda: check_disk(runs_dir()),
        "hub": lambda: check_hub(hub_is_offline(), hub_address()),
    }
    return [Check("environment", name, run) for name, run in named.items()]
