"""SIGTERM, SIGINT and SIGUSR1 ask a run to stop: it finishes its step, saves, and exits with 75.

A second Ctrl-C stops at once. Further SIGTERMs have no effect: batch systems send several before SIGKILL.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lapcli.runtime.errors import Interrupted

_Handler = Callable[[int, FrameType | None], object]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """True once a signal has asked the run to stop; `name` is the signal's. A second Ctrl-C calls `at_once`."""

    def __init__(self, announce: Callable[[str], None], at_once: _Handler) -> None:
        self.name: str | None = None
        self._announce, self._at_once = announce, at_once

    def __bool__(self) -> bool:
        return self.name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
            self._announce(self.name)
        elif number == signal.SIGINT:
            self._at_once(number, frame)


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
def stop_on_signal(
    announce: Callable[[str], None], at_once: _Handler = signal.default_int_handler
) -> Iterator[StopRequest]:
    """Yield a request that records the signals that arrive inside the block; a second one raises KeyboardInterrupt."""
    request = StopRequest(announce, at_once)
    with handled(STOP_SIGNALS, request._on_signal):
        yield request


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: _Handler) -> Iterator[None]:
    """Handle signals inside the block. Python can do so only in the main thread; in other threads nothing is caught.

    Data workers inherit the handler, and ignore the signals: the run itself ends them.
    """
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        # A forked worker has the same handlers, and must not save or announce anything.
        if os.getpid() == owner:
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
_libc: Any = ctypes.CDLL(None)  # loaded at import: nothing may be loaded between fork and exec


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when its parent dies, however it dies; on Linux only.

    `parent` is the expected parent: after its death no signal would be sent.
    """
    if sys.platform != "linux":
        return
    # First the request, then the check of the parent: in the other order, a death in between would go unnoticed.
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
