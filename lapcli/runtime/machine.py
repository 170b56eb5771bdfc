"""The cores of this machine that a run may use, and the compiler that torch.compile needs."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from lapcli.runtime.environment import cores_given
from lapcli.runtime.errors import UsageError


def usable_cores() -> int:
    """Return the cores that this process may use: a batch system, a container or a sweep may limit them."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # not os.cpu_count, which ignores taskset and SLURM's binding
    else:
        cores = os.cpu_count() or 1
    limits = (container_cores(), cores_given())
    return max(1, min([cores, *(limit for limit in limits if limit is not None)]))


def container_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Return the CPU quota of this process's container in whole cores; None if there is none."""
    try:
        quota, period = quota_file.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no control groups, or "max"
        return None


def check_compiler(device_type: str) -> None:
    """Refuse to start if `torch.compile` has no compiler: Triton compiles C for CUDA, Inductor C++ for the CPU."""
    language, variable, names = "C++", "CXX", ["clang++" if sys.platform == "darwin" else "g++"]
    if device_type == "cuda":
        language, variable, names = "C", "CC", ["gcc", "clang"]
    missing = None
    named = os.environ.get(variable)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        missing = "Triton, which is not installed; install it (pip install triton)"
    elif not any(shutil.which(name) for name in ([named.split()[0]] if named else names)):
        missing = f"a {language} compiler, and there is no {named or ' or '.join(names)}; install one or set {variable}"
    elif not header.is_file():
        missing = f"Python's header files, and there is no {header}; install them (python3-dev, python3-devel)"
    if missing:
        raise UsageError(f"train.compile needs {missing}, or use --set train.compile=false")
