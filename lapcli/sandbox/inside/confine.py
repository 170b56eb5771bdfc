"""The entry point of a process in a sandbox: it confines itself before it reads any foreign code, and becomes the
candidate or the tests.

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
    del sys.argv[1:]  # a program does not see the order
    sys.path.pop()  # the folder of this package
    channel = Channel(order["socket"])
    task = json.load(sys.stdin) if order["role"] == "tests" else None
    confine(**order["confinement"])
    # The evaluation reports errors up to here. From here on stderr goes where stdout goes, to /dev/null.
    os.dup2(1, 2)
    if task is not None:
        judge(channel, order["verdict"], task)
    try:
        serve(channel)
    except Closed:
        os._exit(0)


def confine(*, memory: int, cpu_seconds: int, lock: bool, parent: int | None, readable: list[str] | None) -> None:
    """Set the limits; with `lock`, also drop all privileges and install the seccomp filter.

    `memory`: bytes of address space. `parent`: die when this process, our parent, does. `readable`: the only paths that
    Landlock still lets this process read; None if bubblewrap confines the files.
    """
    _limit(memory, cpu_seconds, strict=lock)
    if lock:
        _lock(parent, readable)


def _limit(memory: int, cpu_seconds: int, strict: bool) -> None:
    for name, wanted in {
        "RLIMIT_AS": memory,
        "RLIMIT_CPU": cpu_seconds,  # at the hard limit the kernel sends SIGKILL, which cannot be ignored
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
            if strict:  # other systems than Linux cannot set some limits; only the unsafe mode runs there
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
        if os.getppid() != parent:  # it died before the line above, so that no signal will come
            raise OSError("the evaluation ended meanwhile")
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_DUMPABLE, 0)
    if readable is not None:
        restrict_files(libc, readable)
    # Drops every capability. This matters for root, which keeps its user number and nothing else.
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.syscall(number["capset"], header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capabilities could not be dropped")
    install_filter(libc)
