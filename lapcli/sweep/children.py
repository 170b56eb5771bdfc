"""A command of a cell as a child process: it keeps the cell's lock, writes to its log, and ends with the sweep."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from lapcli.runtime.signals import end_with_parent


def start(
    arguments: Sequence[str], log: IO[bytes], lock: IO[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`lap ARGUMENTS`; the lock is handed down, so that it is held for as long as the child lives."""
    return subprocess.Popen(
        [sys.executable, "-m", "lapcli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, "NO_COLOR": "1", **environment},
        pass_fds=(lock.fileno(),),
        # A group of its own: Ctrl-C reaches a cell through the sweep alone, and so only once.
        process_group=0,
        # When the sweep dies, the system sends SIGTERM, and the cell saves.
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """At once, with all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason_in(log: Path, start: int, code: int) -> str:
    """Why a command ended: its own message, else the last thing it said, else the signal that ended it."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    said = [number for number, line in enumerate(lines) if line.startswith("lap: ")]
    if said:
        return "\n".join([lines[said[-1]].removeprefix("lap: "), *lines[said[-1] + 1 :]][:10])
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; see {log}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return f"{last[:300]}; see {log}"
