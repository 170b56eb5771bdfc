"""Every environment variable that `lap` reads, declared once.

LAP_RUNS        folder of the run directories                (default `runs`)
LAP_CACHE       tokenizers, tokenised text, decoded images   (default `$XDG_CACHE_HOME/lap`, else `~/.cache/lap`)
LAP_CORES       cores to use at most                         (default all that this process may; a sweep divides them)
LAP_TEST_DATA   real benchmark files for the tests           (default none: those tests skip)

Others' variables are honoured where they mean something here: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, NO_COLOR,
OMP_NUM_THREADS, OMP_WAIT_POLICY, and torchrun's RANK, LOCAL_RANK, WORLD_SIZE.
"""

import os
from pathlib import Path

from lapcli.runtime.errors import UsageError


def wait_politely() -> None:
    """Idle CPU threads sleep instead of spinning; has to be said before torch is imported.

    With another program on the machine, a thread that spins keeps the one it waits for off its core: a small model
    then trains fifty times slower. OMP_WAIT_POLICY=ACTIVE has it the other way.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def runs_dir() -> Path:
    return Path(os.environ.get("LAP_RUNS") or "runs")


def cache_dir() -> Path:
    if given := os.environ.get("LAP_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lap"


def cores_given() -> int | None:
    given = os.environ.get("LAP_CORES")
    if not given:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(f"LAP_CORES takes a number of cores, got {given[:40]!r}")
    return int(given)


def hub_is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}
