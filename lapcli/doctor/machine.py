"""Runs the checks of this machine, section by section."""

import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lapcli.doctor.checks import Check, Result, examine
from lapcli.doctor.environment import environment_checks, this_gpu
from lapcli.doctor.kernels import kernel_checks
from lapcli.doctor.training import process_checks, training_checks
from lapcli.runtime import __version__
from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes
from lapcli.runtime.ranks import pick_device


def examine_machine(only: str | None = None, nproc: str = "auto") -> Iterator[Result]:
    """Yield each result as soon as it is known. Without two GPUs, two processes on the CPU communicate by gloo."""
    gpu, processes, device = this_gpu(), Processes(nproc), pick_device("auto")
    processes.check(gpu.count)
    ranks = max(2, processes.here()) if nproc == "auto" else processes.here()
    if only in (None, "processes") and ranks < 2:
        raise UsageError("--nproc must be at least 2 here, because these checks need processes that communicate")
    exchange_on = "cuda" if gpu.count >= ranks else "cpu"
    with tempfile.TemporaryDirectory(prefix="lap-doctor-") as place:
        folder = Path(place)
        checks: list[Check] = [
            *environment_checks(gpu),
            *kernel_checks(torch.device(device)),
            *training_checks(folder, torch.device(device).type),
            *process_checks(folder, ranks, exchange_on),
        ]
        yield from examine(check for check in checks if only in (None, check.section))


def versions() -> dict[str, Any]:
    return {
        "lap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
    }
