"""The interface of checks, how they are run, and the environment checks: GPU, compiler, locks, disk.

A check is a function that returns a finding: it passes, warns or fails, with its number and the next step.
"""

import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lapcli.runtime.environment import cache_dir, check_compiler, runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.signals import end_with_parent
from lapcli.runtime.tables import wrapped

REPORT = "report it with the output of `lap doctor --json`"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
Status = Literal["passes", "warns", "fails"]


@dataclass(frozen=True)
class Finding:
    """The result of a check: one sentence with its number, and what to do if it does not pass."""

    status: Status
    text: str
    next_step: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def passes(text: str, **numbers: Any) -> Finding:
    return Finding("passes", text, "", numbers)


def warns(text: str, next_step: str, **numbers: Any) -> Finding:
    return Finding("warns", text, next_step, numbers)


def fails(text: str, next_step: str, **numbers: Any) -> Finding:
    return Finding("fails", text, next_step, numbers)


@dataclass(frozen=True)
class Check:
    section: str
    name: str
    run: Callable[[], Finding]
    may_crash: bool = False  # a kernel that does not suit the processor can end its process


@dataclass(frozen=True)
class Result:
    section: str
    name: str
    finding: Finding
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"section": self.section, "name": self.name, **asdict(self.finding), "seconds": round(self.seconds, 3)}

    def to_text(self) -> str:
        """Format a line, wrapped to the terminal's width, and below it the next step, if there is one."""
        lines = wrapped(self.finding.text, f"{self.finding.status:<8}{self.name:<29}")
        if self.finding.next_step:
            lines += wrapped(f"next: {self.finding.next_step}", " " * 8)
        return "\n".join(lines)


def examine(checks: Iterable[Check]) -> Iterator[Result]:
    """Yield each result as soon as it is available. A check that raises or kills its process failed; the others run."""
    pool: ProcessPoolExecutor | None = None
    for check in checks:
        started = time.perf_counter()
        try:
            if check.may_crash and pool is None:
                # Spawned: a forked child could not use CUDA, which this process has already initialised.
                spawn, ending = multiprocessing.get_context("spawn"), (os.getpid(), signal.SIGKILL)
                pool = ProcessPoolExecutor(1, spawn, initializer=end_with_parent, initargs=ending)
            finding = pool.submit(check.run).result() if check.may_crash and pool else check.run()
        except BrokenProcessPool:
            pool = None
            # Virtual machines may report instructions (mostly AMX) that they do not have.
            finding = fails("it ended its process", f"set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or {REPORT}")
        except Exception as error:
            finding = fails(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", REPORT)
        yield Result(check.section, check.name, finding, time.perf_counter() - started)
    if pool is not None:
        pool.shutdown()


@dataclass(frozen=True)
class Gpu:
    """The GPUs of a machine according to torch and the driver; they are assumed to be alike."""

    count: int
    name: str = ""
    native_bf16: bool = False
    driver: str | None = None


def this_gpu() -> Gpu:
    driver = None
    # Not from torch: a driver that torch cannot use must be detected too.
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


def environment_checks(gpu: Gpu) -> list[Check]:
    named: dict[str, Callable[[], Finding]] = {
        "GPU": partial(check_gpu, gpu),
        "compiler": partial(check_compiling, "cuda" if gpu.count else "cpu"),
        "locks of runs": partial(check_locks, "LAP_RUNS", runs_dir()),
        "locks of the cache": partial(check_locks, "LAP_CACHE", cache_dir()),
        "disk": partial(check_disk, runs_dir()),
    }
    return [Check("environment", name, run) for name, run in named.items()]


def check_compiling(device_type: str) -> Finding:
    try:
        check_compiler(device_type)
    except UsageError as error:
        if device_type == "cuda":
            return fails(str(error), "follow this message")
        return warns(str(error), "nothing: on the CPU no run compiles by default")
    return passes("torch.compile finds what it needs")


def check_disk(folder: Path) -> Finding:
    place = _existing(folder)
    left = shutil.disk_usage(place).free
    text = f"{left / 1e9:.1f} GB free in {place}"
    if left >= 20 * 10**9:  # a run of the 561M GPT keeps three checkpoints of 5.4 GB
        return passes(text)
    return warns(text, "set LAP_RUNS to a larger disk; `lap plan` says what a run needs")


def check_locks(variable: str, folder: Path) -> Finding:
    """Take a lock in the folder twice; the second attempt has to be refused."""
    place, step = _existing(folder), f"set {variable} to another disk"
    try:
        with tempfile.NamedTemporaryFile(prefix=".lap-doctor-", dir=place) as file, open(file.name, "rb") as again:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock belongs to an open file, so opening it again is refused as for another process.
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return passes(f"{variable}: they work in {place}")
    except OSError as error:
        return fails(f"{variable}: no locks in {place} ({error.strerror}), so two processes can work on one run", step)
    return fails(f"{variable}: {place} grants one lock twice, so two processes would write the same run", step)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it: a check creates no folder."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())
