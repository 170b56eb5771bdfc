"""How a process of the sandbox is started: which Python, which files it may read, and bubblewrap around it."""

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
    """How Python is started: without site-packages, the current folder or the user's folder.

    A virtual environment is left behind; what counts is the interpreter that it was made from.
    """
    return [executable(), "-P", "-s", "-S", "-B", "-c", _START, str(INSIDE.parent), order]


def environment() -> dict[str, str]:
    """All that the sandbox is told: sets have the same order each time, so that a verdict is the same the next time."""
    return {"PYTHONHASHSEED": "0"}


@cache
def executable() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def readable() -> tuple[str, ...]:
    """Paths inside which everything may be read, under the names by which Python and the linker ask for them."""
    base = {"installed_base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not the virtual environment
    library = (sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib"))
    paths = [executable(), str(INSIDE), *library]
    if sys.base_prefix != "/usr":
        paths += [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    several = sysconfig.get_config_var("MULTIARCH") or "none"
    for folder in ("/lib", "/usr/lib"):
        own = os.path.join(folder, several)
        paths.append(own if os.path.isdir(own) else folder)
    paths += ["/lib64", "/usr/lib64", "/nix/store", "/etc/ld.so.cache"]
    there = {path for given in paths for path in (given, os.path.realpath(given)) if os.path.exists(path)}
    return tuple(sorted(path for path in there if not any(path.startswith(other + "/") for other in there)))


@cache
def bubblewrap() -> str | None:
    return shutil.which("bwrap")


def in_bubblewrap(command: list[str]) -> list[str]:
    """`command` in namespaces of its own: no network, no processes but itself, and of the files only the readable
    ones, not to be written. There is an empty /tmp, and neither /proc nor /dev: Python needs none of the two, and
    mounting them is what containers forbid."""
    bwrap = bubblewrap() or "bwrap"
    binds = [word for path in readable() for word in ("--ro-bind", path, path)]
    return [
        bwrap,
        *("--unshare-all", "--unshare-user", *_no_more_namespaces(bwrap)),
        *("--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox"),
        # Python is the first process inside. Bubblewrap's own would be left to init, and a container often has none.
        *("--die-with-parent", "--new-session", "--as-pid-1"),
        *("--dir", "/tmp", *binds, "--remount-ro", "/", "--chdir", "/tmp"),
        *("--", *command),
    ]


@cache
def _no_more_namespaces(bwrap: str) -> tuple[str, ...]:
    """Since version 0.8; before, the filter inside alone forbids them."""
    said = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    return ("--disable-userns",) if "--disable-userns" in said else ()
