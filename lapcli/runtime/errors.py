"""The errors a user can cause. Each message is one sentence with the next step; commands print it alone."""

import errno
import os
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2  # wrong usage, recipe or data
    WILL_NOT_FIT = 3
    STOPPED = 130  # at once, by Ctrl-C: 128 + SIGINT, as in shells and typer
    LOST_PEER = 76  # from a rank to its launcher: another rank is gone, and that one reports the reason if it can
    INTERRUPTED = 75  # saved; the same command resumes (EX_TEMPFAIL, which batch systems requeue on)


#: Message of a command that Ctrl-C ends at once.
STOPPED = "lap: stopped; what was saved is kept, run the same command to resume"


class LapError(Exception):
    """Something failed while running: a full disk, a diverged loss, a dead rank."""

    exit_code = ExitCode.FAILED
    is_echo = False  # rank 0 reports the same error, so this rank stays silent


class Diverged(LapError):
    """The loss or its gradient is no longer finite; a search counts such a run as tried."""


class Interrupted(LapError):
    """A signal asked the run to stop; its state is saved."""

    exit_code = ExitCode.INTERRUPTED


class UsageError(LapError):
    """Invalid usage, recipe or data; nothing was started and nothing is lost."""

    exit_code = ExitCode.USAGE


class DataError(UsageError):
    """Data that is missing, empty or not in the format that the recipe names."""


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, and all of them."""
    names = list(known)
    near = get_close_matches(name, names, 1)
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{f'; did you mean {near[0]}? Known' if near else '; known'}: {shown or 'none yet'}"


#: Errors that need other permissions or another folder; trying again would not help.
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}


def shortened(name: str) -> str:
    """Shorten a very long name in the middle, for messages."""
    return name if len(name) <= 240 else f"{name[:150]}...{name[-60:]}"


def from_os_error(error: OSError) -> LapError:
    """Explain an operating system error that no caller handled: the file, the reason and the next step."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    # Only the command's own output is written without a file name.
    what = " to ".join(map(shortened, names)) or "the output"
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LapError(f"{what} cannot be written ({reason}); make room on that disk, then run the same command again")
    if error.errno in _NOT_ALLOWED:
        return UsageError(
            f"{what} cannot be used ({reason}); check its name and permissions, or choose another place with "
            "--runs-dir, --out or LAP_CACHE"
        )
    return LapError(f"{what} cannot be used ({reason}); was it moved? Restore it, then run the same command again")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error means that a device is out of memory; torch has an exception for CUDA only."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)


#: Parts of the messages of gloo and NCCL if the peer of a collective is gone.
_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "gloo/transport")


def from_peer_error(error: RuntimeError) -> LapError | None:
    """Explain a collective that failed because of another rank; None for other errors."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    reason = next(iter(str(error).splitlines()), "")[:200]
    if "Timed out waiting" in str(error):
        return LapError(
            f"another rank did not answer within --step-timeout ({reason}); the same command resumes from the last "
            "checkpoint, and a larger --step-timeout gives a slow step or save more time"
        )
    if not any(words in str(error) for words in _GONE):
        return None
    lost = LapError(f"another rank has ended; its own message says why ({reason})")
    lost.exit_code = ExitCode.LOST_PEER
    return lost
