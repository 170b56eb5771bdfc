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

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Patience:
    """Tells a second request to stop from the first one that arrives twice.

    `timeout` and batch systems signal a process and its whole group, and a launcher passes on what its ranks have had
    already: the copies of one SIGTERM come within a moment of each other.
    """

    MOMENT = 2.0  # seconds

    def __init__(self) -> None:
        self._is_asked = False
        self._first_sigterm: float | None = None

    def is_over(self, number: int) -> bool:
        """Whether this signal, after those before it, means at once."""
        now = time.monotonic()
        if number == signal.SIGTERM and self._first_sigterm is None:
            self._first_sigterm = now
        again = number == signal.SIGTERM and now - (self._first_sigterm or now) > self.MOMENT
        again = again or (number == signal.SIGINT and self._is_asked)
        self._is_asked = True
        return again


class StopRequest:
    """Whether a signal came."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.name: str | None = None
        self._announce = announce
        self._patience = Patience()

    def __bool__(self) -> bool:
        return self.name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._patience.is_over(number):
            raise KeyboardInterrupt
        first, self.name = self.name is None, signal.Signals(number).name
        if first:
            self._announce(self.name)


@contextmanager
def stop_before_the_first_step() -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 end the command in order, as Ctrl-C does: there is nothing to save yet."""

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Interrupted(f"stopped by {name} before the first step; run the same command to begin again")

    with handled((signal.SIGTERM, signal.SIGUSR1), stop):
        yield


@contextmanager
def stop_on_signal(announce: Callable[[str], None]) -> Iterator[StopRequest]:
    """Notes the signals that come inside the block."""
    request = StopRequest(announce)
    with handled(ASKING, request._on_signal):
        yield request


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the block; outside the main thread Python cannot, and nothing is caught."""
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # those who read its data inherit the handler; the run itself tells them when to end
            handler(number, frame)

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
_libc: Any = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may be


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """The system sends `number` to this process when its parent dies, however that comes; on Linux only.

    `parent` is who it should be: one that died before this call sends nothing any more.
    """
    if sys.platform != "linux":
        return
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
