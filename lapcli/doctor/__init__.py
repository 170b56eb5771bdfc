"""Checks that a machine computes, trains and synchronises as `lap` expects, which CI without a GPU cannot show."""

import platform
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lapcli.doctor.checks import Check, Result, environment_checks, examine, this_gpu
from lapcli.doctor.kernels import kernel_checks
from lapcli.doctor.training import check_ranks, check_resume
from lapcli.runtime import __version__
from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes
from lapcli.runtime.ranks import pick_device


def examine_machine(only: str | None = None, nproc: str = "auto") -> Iterator[Result]:
    """Yield each result as soon as it is available. Without two GPUs, two processes on the CPU communicate by gloo."""
    gpu, processes, device = this_gpu(), Processes(nproc), pick_device("auto")
    processes.check(gpu.count)
    ranks = max(2, processes.here()) if nproc == "auto" else processes.here()
    if only in (None, "processes") and ranks < 2:
        raise UsageError("--nproc must be at least 2 here, because these checks need processes that communicate")
    exchange_on = "cuda" if gpu.count >= ranks else "cpu"
    with tempfile.TemporaryDirectory(prefix="lap-doctor-") as place:
        folder = Path(place)
        checks = [*environment_checks(gpu), *kernel_checks(torch.device(device))]
        if device != "mps":  # Apple GPUs have no deterministic algorithms
            checks.append(Check("training", "killed and resumed", partial(check_resume, folder, device)))
        checks.append(Check("processes", "as one process", partial(check_ranks, folder, ranks, exchange_on)))
        yield from examine(check for check in checks if only in (None, check.section))


def versions() -> dict[str, Any]:
    return {
        "lap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
    }
