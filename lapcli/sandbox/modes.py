"""Which way to run generated code this machine offers, tried out by a program that attacks it."""

import sys
from functools import cache

from lapcli.runtime.errors import LapError, UsageError
from lapcli.sandbox import command
from lapcli.sandbox.run import Candidate, Mode, run_candidate

WARNING = (
    "WARNING: generated code runs WITHOUT A SANDBOX, as you, on your files and your network. The result will say so."
)


def choose_mode(allow_unsafe: bool) -> Mode:
    """The safest mode that works here. If none does: the unsafe one, loudly, if it is allowed, and else an error."""
    problems = []
    for mode in (Mode.BUBBLEWRAP, Mode.LANDLOCK):
        problem = probe(mode)
        if problem is None:
            return mode
        problems.append(f"{mode}: {problem}")
    if allow_unsafe:
        print(WARNING, *problems, sep="\n  ", file=sys.stderr)
        return Mode.UNSAFE
    raise UsageError(
        "generated code needs a sandbox, and this machine offers none: install bubblewrap "
        "(`apt-get install bubblewrap`, `dnf install bubblewrap`), use Linux 5.13 or newer with Landlock and seccomp, "
        "or accept the danger with --unsafe-code-execution (" + "; ".join(problems) + ")"
    )


# A sample like any other, whose answer is right only if the sandbox holds: no host files, no network, no processes.
_PROBE = Candidate(
    prompt="",
    program="""
import os, socket

def attempts():
    held = []
    for attempt in (
        lambda: os.listdir(os.path.expanduser("~root") if os.getuid() == 0 else "/home"),
        lambda: open("/etc/passwd"),
        lambda: open("/tmp/probe", "w"),
        lambda: socket.socket(),
        lambda: os.fork(),
        lambda: os.kill(os.getppid(), 0),
    ):
        try:
            attempt()
            held.append(False)
        except OSError:
            held.append(True)
    return held
""",
    test="def check(candidate):\n    assert all(candidate())\n",
    entry_point="attempts",
)


@cache
def probe(mode: Mode) -> str | None:
    """What is wrong with a mode on this machine, by using it once; None if it works."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if mode is Mode.BUBBLEWRAP and command.bubblewrap() is None:
        return "bwrap is not installed"
    try:
        verdict = run_candidate(_PROBE, mode)
    except LapError as error:
        return str(error)
    return None if verdict.passed else f"the sandbox does not hold ({verdict.reason})"
