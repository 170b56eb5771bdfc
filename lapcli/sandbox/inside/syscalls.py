"""System calls by name and number, for the two machines that are supported.

The numbers are Linux' own and never change. A name that a machine does not have is a dash: aarch64 has no `open`, only
`openat`.
"""

import os

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

# What the table is for besides the filter: the calls that set a sandbox up, and are not allowed in it.
SETUP = frozenset({"capset", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"})

# How the kernel names the machine to a seccomp filter (linux/audit.h).
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def numbers(machine: str | None = None) -> dict[str, int]:
    """Number of each call on `machine`; by default on this one. Empty for a machine that is not in the table."""
    machine = machine or os.uname().machine
    if machine not in AUDIT_ARCH:
        return {}
    column = 1 + list(AUDIT_ARCH).index(machine)
    rows = [line.split() for line in _TABLE.splitlines() if line.strip()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
