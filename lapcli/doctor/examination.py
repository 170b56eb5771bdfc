"""Runs the checks of this machine, section by section."""

import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lapcli.doctor.checks import Check, Result, examine, examine_apart
from lapcli.doctor.environment import environment_checks, this_gpu
from lapcli.doctor.kernels import kernel_checks
from lapcli.doctor.processes import process_checks
from lapcli.doctor.training import training_checks
from lapcli.runtime import __version__
from lapcli.runtime.devices import this_device
from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes
from lapcli.runtime.ranks import pick_device

SECTIONS = ("environment", "kernels", "training", "processes")


def examine_machine(only: str | None = None, nproc: str = "auto") -> Iterator[Result]:
    """Yield each result as soon as it is known. Without two GPUs, two processes on the CPU communicate by gloo."""
    gpu = this_gpu()
    processes = Processes(nproc)
    processes.check_gpus(gpu.count)
    ranks = max(2, processes.here()) if nproc == "auto" else processes.here()
    sections = SECTIONS if only is None else (only,)
    if "processes" in sections and ranks < 2:
        raise UsageError("--nproc must be at least 2 here, because these checks need processes that communicate")
    exchange_on = "cuda" if gpu.count >= ranks else "cpu"
    device = this_device(pick_device("auto"))
    with tempfile.TemporaryDirectory(prefix="lap-doctor-") as place:
        folder = Path(place)
        if "environment" in sections:
            yield from examine(environment_checks(gpu, ranks))
        if "kernels" in sections:
            yield from examine_apart(kernel_checks_here)
        if "training" in sections:
            yield from examine(training_checks(folder, device, gpu.count))
        if "processes" in sections:
            yield from examine(process_checks(folder, ranks, exchange_on))


def kernel_checks_here() -> list[Check]:
    """Build the kernel checks; importable, because a process of its own builds them again."""
    return kernel_checks(torch.device(pick_device("auto")))


def versions() -> dict[str, Any]:
    return {
        "lap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
    }
