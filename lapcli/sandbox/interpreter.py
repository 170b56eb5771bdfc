"""The Python that runs inside, and the files that it needs to read: itself, its library, shared libraries."""

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path

# Imported for their compiled form, which the sandbox can read and not write.

INSIDE = Path(__file__).parent / "inside"
_START = "import sys; sys.path.append(sys.argv[1]); from inside.start import main; main(sys.argv[2])"


def command(order: str) -> list[str]:
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
