"""Landlock: from here on this process can read the given paths, and nothing else of the file system.

Later versions of the kernel's interface also close TCP and signals to processes outside; each is used where it is
there. What no version hides is whether a file exists, and its size and dates.
"""

import ctypes
import os

from .syscalls import numbers

_READ = 1 << 2 | 1 << 3  # files, folders
_READ_FILE = 1 << 2
_VERSION = 1  # flag of landlock_create_ruleset: only say which version this is
_PATH_BENEATH = 1


def version(libc: ctypes.CDLL) -> int:
    """Version of the kernel's Landlock, 0 if it has none or it is switched off."""
    number = numbers().get("landlock_create_ruleset")
    return max(0, libc.syscall(number, None, 0, _VERSION)) if number else 0


def restrict(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Needs no_new_privs."""
    number = numbers()
    known = version(libc)
    if known == 0:
        raise OSError("the kernel has no Landlock, or it is switched off")
    # Access rights that each version knows; all of them are handled, that is, denied unless a rule says otherwise.
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(known, 16)

    class Ruleset(ctypes.Structure):
        _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]

    class PathBeneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("access", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    handled = Ruleset((1 << rights) - 1, 0b11 if known >= 4 else 0, 0b11 if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
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
