"""The filter's decisions for both architectures, checked with the kernel's headers and a small filter interpreter."""

import re
from pathlib import Path

import pytest

from lapcli.sandbox.inside.restrictions import AUDIT_ARCH, SETUP, instructions, numbers

ALLOW, EPERM = 0x7FFF0000, 0x00050001
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
FORBIDDEN = set(
    re.findall(
        r"\w+",
        """
socket socketpair connect bind sendto sendmsg recvmsg clone clone3 fork vfork execve execveat kill tkill tgkill
rt_sigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd ptrace process_vm_readv process_vm_writev ioctl prctl seccomp
unshare setns mount umount2 pivot_root chroot chdir openat2 open_by_handle_at creat truncate ftruncate unlink unlinkat
rename renameat2 link linkat symlink symlinkat mkdir mkdirat mknod mknodat chmod fchmod fchmodat chown fchown fchownat
utimensat setxattr memfd_create userfaultfd bpf perf_event_open io_uring_setup io_uring_enter keyctl add_key setrlimit
prlimit64 setpriority sched_setaffinity sched_setscheduler setuid setgid setresuid setgroups capset setsid setpgid
shmget semget msgget mq_open inotify_init1 fanotify_init timer_create personality reboot kexec_load init_module
finit_module swapon landlock_create_ruleset arch_prctl iopl modify_ldt vmsplice splice tee sendfile pipe2 eventfd2
signalfd4 readlink readlinkat flock fallocate copy_file_range name_to_handle_at syslog process_madvise
""",
    )
)


def header(machine: str) -> dict[str, int]:
    path = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"the kernel's headers are not installed ({path})")
    text = path.read_text().replace("__NR3264_", "__NR_")
    return {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)\b", text)}


def decide(program, arch: int, number: int, arguments=(0,) * 6) -> int:
    """Run a filter on one call, following the kernel's documentation of classic BPF."""
    words = {0: number, 4: arch, **{16 + 8 * n: value & 0xFFFFFFFF for n, value in enumerate(arguments)}}
    at = accumulator = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:  # load
            accumulator = words[operand]
        elif code == 0x54:  # and
            accumulator &= operand
        elif code == 0x15:  # jump if equal
            at += if_true if accumulator == operand else if_false
        else:
            assert code == 0x06  # return
            return operand


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_syscall_numbers_match_the_kernel(machine):
    kernel = header(machine)
    ours = numbers(machine)
    assert len(ours) > 60
    assert ours == {name: kernel[name if name in kernel else {"newfstatat": "fstatat"}[name]] for name in ours}


@pytest.mark.parametrize("machine", AUDIT_ARCH)
def test_only_listed_syscalls_are_allowed(machine):
    kernel, program = header(machine), instructions(machine)
    allowed = {number for name, number in numbers(machine).items() if name not in SETUP}
    for number in [*range(1024), *(0x40000000 | n for n in range(1024))]:  # the latter are x32's
        found = decide(program, AUDIT_ARCH[machine], number, (0, 0, 0, 0, 0, 0))
        assert found == (ALLOW if number in allowed else EPERM)
    there = [name for name in FORBIDDEN if name in kernel]
    assert len(there) > 60
    assert not {kernel[name] for name in there} & allowed


def test_files_are_opened_for_reading_only():
    import os

    program, arch, number = instructions("x86_64"), AUDIT_ARCH["x86_64"], numbers("x86_64")
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CLOEXEC, os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC):
        assert decide(program, arch, number["openat"], (0, 0, flags)) == ALLOW
        assert decide(program, arch, number["open"], (0, flags, 0o777)) == ALLOW
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_TMPFILE, os.O_PATH, os.O_ASYNC):
        assert decide(program, arch, number["openat"], (0, 0, flags)) == EPERM
        assert decide(program, arch, number["open"], (0, flags, 0)) == EPERM
