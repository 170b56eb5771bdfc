"""How a process in a sandbox begins: it shuts itself in, before it has seen a line of anybody else's code, and becomes
the candidate or the tests.

Every step raises if it fails: a process that could not be confined never says that it is ready.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from .candidate import serve
from .messages import Channel, Closed
from .tester import judge

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = 9


def main(order_json: str) -> None:
    order = json.loads(order_json)
    del sys.argv[1:]
    sys.path.pop()  # the folder of this package
    channel = Channel(order["socket"])
    task = json.load(sys.stdin) if order["role"] == "tests" else None
    confine(**order["confinement"])
    # Errors up to here are for the evaluation to report. From here on stderr is as quiet as stdout, which is /dev/null.
    os.dup2(1, 2)
    if task is not None:
        judge(channel, order["verdict"], task)
    try:
        serve(channel)
    except Closed:
        os._exit(0)


def confine(*, memory: int, cpu_seconds: int, lock: bool, parent: int | None, readable: list[str] | None) -> None:
    """Limits, and with `lock` no privileges and the seccomp filter.

    `memory`: bytes of address space. `parent`: die when this process, our parent, does. `readable`: the only paths that
    can still be read, by Landlock; none where something else sees to that.
    """
    _limit(memory, cpu_seconds, strict=lock)
    if lock:
        _lock(parent, readable)


def _limit(memory: int, cpu_seconds: int, strict: bool) -> None:
    for name, wanted in {
        "RLIMIT_AS": memory,
        "RLIMIT_CPU": cpu_seconds,  # at the hard limit the kernel kills; there is nothing to ignore
        "RLIMIT_FSIZE": 1 << 20,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        "RLIMIT_STACK": 64 << 20,
        "RLIMIT_MEMLOCK": 0,
    }.items():
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        value = wanted if ceiling == resource.RLIM_INFINITY else min(wanted, ceiling)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            if strict:  # elsewhere than on Linux some limits cannot be set, and only the unsafe mode runs
                raise


def _lock(parent: int | None, readable: list[str] | None) -> None:
    import ctypes

    from .restrictions import install_filter, numbers, restrict_files

    number = numbers()
    if not number:
        raise OSError(f"no table of system calls for {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long

    def prctl(option: int, value: int) -> None:
        if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option} failed")

    if parent is not None:
        prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != parent:
            raise OSError("the evaluation ended meanwhile")
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_DUMPABLE, 0)
    if readable is not None:
        restrict_files(libc, readable)
    # No capability is left, which matters for root: it keeps its number, and nothing else.
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.syscall(number["capset"], header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capabilities could not be dropped")
    install_filter(libc)
