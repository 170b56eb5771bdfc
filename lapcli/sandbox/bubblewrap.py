"""The command line of bubblewrap."""

import subprocess
from functools import cache


def wrapped(bwrap: str, command: list[str], readable: tuple[str, ...]) -> list[str]:
    """`command` in namespaces of its own: no network, no processes but itself, and of the files only `readable`, not to
    be written. There is an empty /tmp, and neither /proc nor /dev: Python needs none of the two, and mounting them is
    what containers forbid."""
    binds = [word for path in readable for word in ("--ro-bind", path, path)]
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
