"""Restrictions that the kernel enforces on this process: files by Landlock, system calls by seccomp.

Landlock: this process can read the given paths, and nothing else of the file system. Later versions of the kernel's
interface also forbid TCP and signals to processes outside; each is used where the kernel has it. No version hides
whether a file exists, or its size and dates.

seccomp: a list of the system calls that are allowed; everything else fails with EPERM. Allowed are memory, time,
reading, writing to open descriptors, and exiting. Not allowed are, among others, sockets, new processes and threads,
other programs, signals to any process, limits, ioctl, and opening anything for writing. The arguments of three calls
are checked. `open` and `openat` may only read. `fcntl` may duplicate and query a descriptor, but neither set an owner
nor request signals: that would send a signal, even SIGKILL, to a process of the same user.
"""

import ctypes
import os
import struct

# System calls by name and number, for the two machines that are supported. The numbers are Linux' own and never change.
# A name that a machine does not have is a dash: aarch64 has no `open`, only `openat`.
#            name                x86_64 aarch64
_TABLE = """
             read                     0      63
             readv                   19      65
             pread64                 17      67
             preadv                 295      69
             write                    1      64
             writev                  20      66
             pwrite64                18      68
             lseek                    8      62
             close                    3      57
             close_range            436     436
             dup                     32      23
             dup2                    33       -
             dup3                   292      24
             fcntl                   72      25
             open                     2       -
             openat                 257      56
             stat                     4       -
             fstat                    5      80
             lstat                    6       -
             newfstatat             262      79
             statx                  332     291
             statfs                 137      43
             fstatfs                138      44
             access                  21       -
             faccessat              269      48
             faccessat2             439     439
             getdents64             217      61
             getcwd                  79      17
             poll                     7       -
             ppoll                  271      73
             select                  23       -
             pselect6               270      72
             mmap                     9     222
             munmap                  11     215
             mprotect                10     226
             mremap                  25     216
             madvise                 28     233
             brk                     12     214
             futex                  202      98
             sched_yield             24     124
             sched_getaffinity      204     123
             getcpu                 309     168
             rt_sigaction            13     134
             rt_sigprocmask          14     135
             rt_sigreturn            15     139
             rt_sigpending          127     136
             sigaltstack            131     132
             restart_syscall        219     128
             nanosleep               35     101
             clock_nanosleep        230     115
             clock_gettime          228     113
             clock_getres           229     114
             gettimeofday            96     169
             time                   201       -
             times                  100     153
             getrusage               98     165
             getrandom              318     278
             getpid                  39     172
             getppid                110     173
             gettid                 186     178
             getuid                 102     174
             geteuid                107     175
             getgid                 104     176
             getegid                108     177
             uname                   63     160
             sysinfo                 99     179
             exit                    60      93
             exit_group             231      94

             capset                 126      91
             landlock_create_ruleset 444    444
             landlock_add_rule      445     445
             landlock_restrict_self 446     446
"""

# Calls of the table that set a sandbox up; the filter does not allow them.
SETUP = frozenset({"capset", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"})

# How the kernel identifies the architecture to a seccomp filter (linux/audit.h).
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def numbers(machine: str | None = None) -> dict[str, int]:
    """Return the number of each call on `machine`, by default this one; empty if the machine is not in the table."""
    machine = machine or os.uname().machine
    if machine not in AUDIT_ARCH:
        return {}
    column = 1 + list(AUDIT_ARCH).index(machine)
    rows = [line.split() for line in _TABLE.splitlines() if line.strip()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


_READ = 1 << 2 | 1 << 3  # files, folders
_READ_FILE = 1 << 2
_VERSION = 1  # flag of landlock_create_ruleset: only say which version this is
_PATH_BENEATH = 1


def landlock_version(libc: ctypes.CDLL) -> int:
    """Return the version of the kernel's Landlock, 0 if it is missing or disabled."""
    number = numbers().get("landlock_create_ruleset")
    return max(0, libc.syscall(number, None, 0, _VERSION)) if number else 0


def restrict_files(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Restrict this process to reading the given paths, irrevocably. Needs no_new_privs."""
    number = numbers()
    version = landlock_version(libc)
    if version == 0:
        raise OSError("the kernel has no Landlock, or it is disabled")
    # Access rights that each version knows; all of them are handled, that is, denied unless a rule says otherwise.
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)

    class Ruleset(ctypes.Structure):
        _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]

    class PathBeneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("access", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    handled = Ruleset((1 << rights) - 1, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    # The length of `struct landlock_ruleset_attr` in each version.
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _checked(libc.syscall(number["landlock_create_ruleset"], ctypes.byref(handled), size, 0))
    for path in readable:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = _READ if os.path.isdir(path) else _READ_FILE
        rule = PathBeneath(access, descriptor)
        _checked(libc.syscall(number["landlock_add_rule"], ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
        os.close(descriptor)
    _checked(libc.syscall(number["landlock_restrict_self"], ruleset, 0))
    os.close(ruleset)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock failed")
    return result


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
    """Return the filter as a straight line: each call is compared, and the instructions after the comparison decide."""
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


def install_filter(libc: ctypes.CDLL) -> None:
    """Install the filter on this process, irrevocably. Needs no_new_privs."""
    program = instructions()
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):  # struct sock_fprog
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    header = Program(len(program), ctypes.addressof(code))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filters are not available")
