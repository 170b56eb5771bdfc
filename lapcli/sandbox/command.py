"""The command that starts a process of the sandbox: the Python, the files it may read, and bubblewrap around it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
_START = "import sys; sys.path.append(sys.argv[1]); from inside.confine import main; main(sys.argv[2])"


def python(order: str) -> list[str]:
    """Return the command that starts Python without site-packages, the current folder and the user's folder.

    In a virtual environment it starts the interpreter that the environment was made from.
    """
    return [executable(), "-P", "-s", "-S", "-B", "-c", _START, str(INSIDE.parent), order]


def environment() -> dict[str, str]:
    """Return the whole environment of the sandbox. The hash seed fixes the order of sets: verdicts are reproducible."""
    return {"PYTHONHASHSEED": "0"}


@cache
def executable() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def readable() -> tuple[str, ...]:
    """Return the paths below which everything may be read, by the names that Python and the linker ask for."""
    base = {"installed_base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not the virtual environment
    library = (sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))
    paths = [executable(), str(INSIDE), *library]
    if sys.base_prefix != "/usr":
        paths += [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    multiarch = sysconfig.get_config_var("MULTIARCH") or "none"  # Debian's folder for one architecture
    for folder in ("/lib", "/usr/lib"):
        libraries = os.path.join(folder, multiarch)
        paths.append(libraries if os.path.isdir(libraries) else folder)
    paths += ["/lib64", "/usr/lib64", "/nix/store", "/etc/ld.so.cache"]
    existing = {path for name in paths for path in (name, os.path.realpath(name)) if os.path.exists(path)}
    return tuple(sorted(path for path in existing if not any(path.startswith(other + "/") for other in existing)))


@cache
def bubblewrap() -> str | None:
    return shutil.which("bwrap")


def in_bubblewrap(command: list[str]) -> list[str]:
    """Wrap `command` in namespaces of its own: no network, no other processes, and only the readable files, read-only.

    There is an empty /tmp, and neither /proc nor /dev: Python needs neither of them, and containers forbid mounting
    them.
    """
    bwrap = bubblewrap() or "bwrap"
    binds = [word for path in readable() for word in ("--ro-bind", path, path)]
    return [
        bwrap,
        *("--unshare-all", "--unshare-user", *_no_more_namespaces(bwrap)),
        *("--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox"),
        # Python is process 1 inside. Bubblewrap's own process 1 would be left to init, and a container often has none.
        *("--die-with-parent", "--new-session", "--as-pid-1"),
        *("--dir", "/tmp", *binds, "--remount-ro", "/", "--chdir", "/tmp"),
        *("--", *command),
    ]


@cache
def _no_more_namespaces(bwrap: str) -> tuple[str, ...]:
    """Forbid further namespaces if bubblewrap can (since version 0.8); the seccomp filter forbids them anyway."""
    options = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    return ("--disable-userns",) if "--disable-userns" in options else ()
