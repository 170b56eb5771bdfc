"""The environment of a process: all variables that `lap` reads, its own and other tools', cores and compiler.

LAP_RUNS          folder of the run directories                (default `runs`)
LAP_CACHE         tokenizers, tokenised text, downloads        (default `$XDG_CACHE_HOME/lap`, else `~/.cache/lap`)
LAP_STEP_TIMEOUT  minutes that ranks wait for each other       (default 30; as --step-timeout)
LAP_CORES         cores to use at most                         (default all; a sweep sets a job's share)
LAP_LAUNCHER      process that started this rank               (set by the launcher, so that no rank outlives it)
LAP_STOPPED       file that marks a launch asked to stop       (set by the launcher)
LAP_ELASTIC       machines may leave and join                  (set by the launcher)
LAP_TEST_DATA     real benchmark files for the tests           (default none: those tests skip)

Variables of other tools that are honoured: XDG_CACHE_HOME, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE,
HTTPS_PROXY, ALL_PROXY, NO_COLOR, OMP_NUM_THREADS, OMP_WAIT_POLICY, CUDA_VISIBLE_DEVICES,
WANDB_PROJECT, and torchrun's RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT.
"""

import os
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from lapcli.runtime.errors import ExitCode, UsageError

#: Minutes. Ranks also wait for each other while one compiles, saves or prepares data.
STEP_TIMEOUT = 30.0
LAUNCHER, STOPPED_MARK, ELASTIC = "LAP_LAUNCHER", "LAP_STOPPED", "LAP_ELASTIC"


def require_extra(module: str, extra: str) -> None:
    """Raise UsageError with the command that installs a package, if it is missing; nothing is imported."""
    if find_spec(module) is None:
        raise UsageError(f"the package {module} is not installed; install it with: pip install 'lapcli[{extra}]'")


def sleep_while_waiting() -> None:
    """Let idle CPU threads sleep instead of spinning; must be called before torch is imported.

    With another program on the machine, a thread that spins keeps the one it waits for off its core: a small model
    then trains fifty times slower. OMP_WAIT_POLICY=ACTIVE restores the spinning.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def runs_dir() -> Path:
    return Path(os.environ.get("LAP_RUNS") or "runs")


def cache_dir() -> Path:
    if folder := os.environ.get("LAP_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lap"


def inside_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main_process() -> bool:
    """Return whether this is rank 0, which prints and writes for all ranks; also true without a process group."""
    return os.environ.get("RANK", "0") == "0"


def is_first_here() -> bool:
    """Return whether this is the first process of its machine, which verifies files for the others."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def launcher() -> int | None:
    pid = os.environ.get(LAUNCHER, "")
    return int(pid) if pid.isdecimal() else None


def stopped_mark() -> Path | None:
    """Return the marker file that exists once this launch was asked to stop; None without a launcher."""
    file = os.environ.get(STOPPED_MARK)
    return Path(file) if file else None


def end_process(code: int) -> NoReturn:
    """Exit; a failed rank skips the cleanup, in which torch and NCCL would wait for the others.

    A rank that was asked to stop leaves a mark and exits with 0: torchrun takes any other code for a failure and
    restarts all ranks. Where machines may join, torchrun itself stops the ranks to start them again with more.
    """
    if code == ExitCode.DONE or not inside_torchrun():
        raise SystemExit(int(code))
    if code == ExitCode.INTERRUPTED and (mark := stopped_mark()) is not None and ELASTIC not in os.environ:
        mark.touch()
        code = ExitCode.DONE
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def hub_is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}


def usable_cores() -> int:
    """Return the cores that this process may use: a batch system, a container or a sweep may limit them."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # not os.cpu_count, which ignores taskset and SLURM's binding
    else:
        cores = os.cpu_count() or 1
    given = os.environ.get("LAP_CORES") or str(cores)
    if not given.isdecimal():
        raise UsageError(f"LAP_CORES takes a number of cores, got {given[:40]!r}")
    return max(1, min(cores, int(given), container_cores() or cores))


def container_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Return the CPU quota of this process's container in complete cores; None if there is none."""
    try:
        quota, period = quota_file.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no control groups, or "max"
        return None


def check_compiler(device_type: str) -> None:
    """Refuse to start if `torch.compile` has no compiler: Triton compiles C for CUDA, Inductor C++ for the CPU."""
    variable, default = ("CC", "gcc") if device_type == "cuda" else ("CXX", "g++")
    compiler = os.environ.get(variable) or default
    missing = None if shutil.which(compiler.split()[0]) else f"the compiler {compiler}: install it, or set {variable}"
    if device_type == "cuda" and find_spec("triton") is None:
        missing = "Triton: pip install triton"
    if missing:
        raise UsageError(f"train.compile needs {missing}; or use --set train.compile=false")
