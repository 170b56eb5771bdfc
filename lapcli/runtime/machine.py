"""The resources of this machine besides its GPUs: cores, shared memory and a compiler.

They are checked before the first step, so that a shortage is a message and not a crash in the middle of one.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path, PurePosixPath

from lapcli.runtime.environment import cores_given
from lapcli.runtime.errors import UsageError

SHARED_MEMORY = Path("/dev/shm")
#: NCCL's buffers in shared memory per process: two channels in a ring and a tree, 9,637,888 bytes each.
NCCL_BYTES = 4 * 9_637_888


def usable_cores() -> int:
    """Return the cores that this process may use: a batch system, a container or a sweep may limit them."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # not os.cpu_count, which ignores taskset and SLURM's binding
    else:
        cores = os.cpu_count() or 1
    limits = (_container_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")), cores_given())
    return max(1, min([cores, *(limit for limit in limits if limit is not None)]))


def _container_cores(membership: Path, mount: Path) -> int | None:
    """Return the tightest CPU quota of this process's control groups, in whole cores; None if there is no quota."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        place = PurePosixPath(group.lstrip("/"))
        # A quota of any group above limits this one too; the last parent is the mount itself.
        quotas += [_quota(mount / folder) for folder in (place, *place.parents) if not controllers]
    limits = [quota for quota in quotas if quota is not None]
    return max(1, int(min(limits))) if limits else None


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def free_shared_memory() -> int | None:
    """Return the free bytes; None without a /dev/shm (shared memory then comes from elsewhere)."""
    try:
        place = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return place.f_bavail * place.f_frsize


def check_shared_memory(needed: int, workers: int) -> None:
    """Refuse to start data workers whose batches do not fit into shared memory: they would die of a bus error.

    `workers` are those of one process, `needed` the bytes of all of them on this machine.
    """
    free = free_shared_memory()
    if free is None or needed <= free:
        return
    fit = workers * free // needed
    raise UsageError(
        f"reading images with data.workers={workers} takes {_size(needed)} of shared memory, and {SHARED_MEMORY} has "
        f"{_size(free)} free; make it larger (docker run --shm-size={_size(needed, up=True)}) or use "
        f"--set data.workers={fit}"
    )


def missing_for_nccl(processes: int) -> str | None:
    """Return a warning if shared memory is too small for NCCL, which uses it between GPUs without peer access."""
    free, needed = free_shared_memory(), processes * NCCL_BYTES
    if free is None or needed <= free:
        return None
    return (
        f"{SHARED_MEMORY} has {_size(free)} free, and NCCL may need {_size(needed)} for {processes} processes; if it "
        f"fails, make it larger (docker run --shm-size={_size(needed, up=True)})"
    )


def _size(count: int, up: bool = False) -> str:
    """Format a size for people, or with `up` rounded up in docker's notation."""
    return f"{-(-count // 10**6)}m" if up else f"{count / 10**6:,.0f} MB"


def check_compiler(device_type: str) -> None:
    """Refuse to start if `torch.compile` has no compiler: Triton compiles C for CUDA, Inductor C++ for the CPU."""
    missing = _missing_for_compile(device_type)
    if missing:
        raise UsageError(f"train.compile needs {missing}, or use --set train.compile=false")


def _missing_for_compile(device_type: str) -> str | None:
    if device_type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton, which is not installed; install it (pip install triton)"
        language, variable, names = "C", "CC", ["gcc", "clang"]
    else:
        language, variable, names = "C++", "CXX", ["clang++" if sys.platform == "darwin" else "g++"]
    named = os.environ.get(variable)
    if named and shutil.which(named.split()[0]) is None:
        return f"a {language} compiler, and {variable} names {named!r}, which does not exist; correct it"
    if not named and not any(shutil.which(name) for name in names):
        return f"a {language} compiler, and there is no {' or '.join(names)}; install one or set {variable}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"Python's header files, and there is no {header}; install them (python3-dev, python3-devel)"
    return None
