"""The errors a user can cause. Each message is one sentence with the next step; commands print it alone."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What `lap` exits with (0 done and 1 failed are everyone's)."""

    DONE = 0
    FAILED = 1
    USAGE = 2  # wrong usage, recipe or data
    WILL_NOT_FIT = 3
    STOPPED = 130  # at once, by Ctrl-C or a second SIGTERM; a shell's 128 + SIGINT, typer's for a KeyboardInterrupt
    INTERRUPTED = 75  # saved; the same command resumes (EX_TEMPFAIL, which batch systems requeue on)


class LapError(Exception):
    """Something failed while running: a full disk, a diverged loss, a dead rank."""

    exit_code = ExitCode.FAILED
    is_echo = False  # rank 0 says the same


class Diverged(LapError):
    """The loss or its gradient is no longer finite; a search counts such a run as tried."""


class UsageError(LapError):
    """Wrong usage, recipe or data; nothing was started and nothing is lost."""

    exit_code = ExitCode.USAGE


class DataError(UsageError):
    """Data that is missing, empty or not of the form the recipe says."""


class Interrupted(LapError):
    """A signal asked the run to stop; its state is saved."""

    exit_code = ExitCode.INTERRUPTED
