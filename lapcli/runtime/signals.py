"""SIGTERM, SIGINT and SIGUSR1 ask a run to stop: it finishes its step, saves, and exits with 75.

A second Ctrl-C or a second SIGTERM stops at once.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lapcli.runtime.errors import Interrupted

_Handler = Callable[[int, FrameType | None], object]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SecondRequest:
    """Tells a second request to stop from copies of the first.

    `timeout` and batch systems signal a process and its whole group, and a launcher passes on signals that its ranks
    have received already: the copies of one SIGTERM arrive within a moment of each other.
    """

    MOMENT = 2.0  # seconds

    def __init__(self) -> None:
        self._is_asked = False
        self._first_sigterm: float | None = None

    def is_second(self, number: int) -> bool:
        """Return whether this signal, after those before it, means to stop at once."""
        now = time.monotonic()
        if number == signal.SIGTERM and self._first_sigterm is None:
            self._first_sigterm = now
        is_second = number == signal.SIGTERM and now - (self._first_sigterm or now) > self.MOMENT
        is_second = is_second or (number == signal.SIGINT and self._is_asked)
        self._is_asked = True
        return is_second


class StopRequest:
    """True once a signal has asked the run to stop; `name` is the signal's."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.name: str | None = None
        self._announce = announce
        self._second_request = SecondRequest()

    def __bool__(self) -> bool:
        return self.name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._second_request.is_second(number):
            raise KeyboardInterrupt
        first, self.name = self.name is None, signal.Signals(number).name
        if first:
            self._announce(self.name)


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 end the command cleanly in the block, as Ctrl-C does: there is nothing to save.

    `stop_on_signal` replaces it for the steps of a run.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Interrupted(f"stopped by {name}; what was saved is kept, run the same command to resume")

    with handled((signal.SIGTERM, signal.SIGUSR1), stop):
        yield


@contextmanager
def stop_on_signal(announce: Callable[[str], None]) -> Iterator[StopRequest]:
    """Yield a request that records the signals that arrive inside the block."""
    request = StopRequest(announce)
    with handled(STOP_SIGNALS, request._on_signal):
        yield request


_AGAIN = 1.0  # seconds


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Provide a context in which Ctrl-C in the middle of an import raises KeyboardInterrupt, as it does elsewhere.

    Libraries may swallow it while they are imported and continue for half a minute, so it is raised again after a
    second. Or they treat the interrupted module as missing and fail with an error of their own; that error becomes the
    KeyboardInterrupt.
    """
    is_asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if number == signal.SIGALRM and _is_being_handled():
            return
        if number == signal.SIGALRM or _is_importing(frame):
            is_asked = True
            # Again in a second, in case the library that is being imported swallows the exception.
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as under nohup
        yield
        return
    # Data workers end at once: nothing has to wait for them.
    with handled((signal.SIGINT, signal.SIGALRM), interrupt, in_children=signal.default_int_handler):
        try:
            yield
        except Exception as error:
            if is_asked:
                raise KeyboardInterrupt from error
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _is_being_handled() -> bool:
    """Return whether a KeyboardInterrupt is being handled already, such as by a `finally` block."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextmanager
def handled(
    numbers: Sequence[signal.Signals], handler: _Handler, *, in_children: _Handler | None = None
) -> Iterator[None]:
    """Handle signals inside the block. Python only can in the main thread; in others nothing is caught.

    Data workers inherit the handler. Without `in_children` they ignore the signals: the run itself ends them.
    """
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        # A forked worker has the same handlers, and must not save or announce anything.
        if os.getpid() == owner:
            handler(number, frame)
        elif in_children is not None:
            in_children(number, frame)

    before = {}
    with contextlib.suppress(ValueError):
        for number in numbers:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_PR_SET_PDEATHSIG = 1
_libc: Any = ctypes.CDLL(None)  # loaded at import: nothing may be loaded between fork and exec


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when its parent dies, however it dies; on Linux only.

    `parent` is the expected parent: one that died before this call would send nothing any more.
    """
    if sys.platform != "linux":
        return
    # First the request, then the look at the parent: the other way round, a death in between would go unnoticed.
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
