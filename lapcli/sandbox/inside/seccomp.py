"""The seccomp filter: a list of the system calls that are allowed; everything else fails with EPERM.

Allowed are memory, time, reading, writing to what is already open, and leaving. Not allowed are, among all others,
sockets, new processes and threads, other programs, signals to anyone, limits, ioctl, and opening anything for writing.

Three calls are looked at more closely. `open` and `openat` may only read. `fcntl` may duplicate and ask, but neither
set an owner nor ask for signals: that would send a signal, even SIGKILL, to a process of the same user.
"""

import ctypes
import os
import struct

from .syscalls import AUDIT_ARCH, SETUP, numbers

# linux/filter.h: load a word of the call, compare, mask, return.
_LOAD, _JUMP_IF_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
# linux/seccomp.h: what a filter may return, and where it finds the call.
_ALLOW, _DENY, _KILL_PROCESS = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # 1 is EPERM
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# Read-only, and flags that change nothing outside. O_TRUNC empties a file even without O_WRONLY; O_ASYNC sends signals.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOCTTY
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def instructions(machine: str | None = None) -> list[Instruction]:
    """The filter as a straight line: each call is compared, and the two lines after the comparison decide."""
    machine = machine or os.uname().machine
    number_of = numbers(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # the calls of another architecture have other numbers
    ]
    for name, number in number_of.items():
        if name in SETUP:
            continue
        decision = _decision(name)
        program += [(_LOAD, 0, 0, _NUMBER), (_JUMP_IF_EQUAL, 0, len(decision), number), *decision]
    return [*program, (_RETURN, 0, 0, _DENY)]


def _decision(name: str) -> list[Instruction]:
    allow, deny = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY)
    if name in {"open", "openat"}:
        flags = _ARGUMENTS + 8 * (1 if name == "open" else 2)
        forbidden = ~_OPEN_FLAGS & 0xFFFFFFFF
        return [(_LOAD, 0, 0, flags), (_AND, 0, 0, forbidden), (_JUMP_IF_EQUAL, 0, 1, 0), allow, deny]
    if name == "fcntl":
        allowed: list[Instruction] = []
        for command in _FCNTL_COMMANDS:
            allowed += [(_JUMP_IF_EQUAL, 0, 1, command), allow]
        return [(_LOAD, 0, 0, _ARGUMENTS + 8), *allowed, deny]
    return [allow]


def install(libc: ctypes.CDLL) -> None:
    """Installs the filter on this process, irrevocably. Needs no_new_privs."""
    program = instructions()
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):  # struct sock_fprog
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    header = Program(len(program), ctypes.addressof(code))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filters are not available")
