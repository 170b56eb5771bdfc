"""SIGTERM, SIGINT and SIGUSR1 ask a run to stop: it finishes its step, saves, and exits with 75."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from lapcli.runtime.errors import Interrupted

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Whether a signal came. A second Ctrl-C stops at once."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.name: str | None = None
        self._announce = announce

    def __bool__(self) -> bool:
        return self.name is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
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

    with _handled((signal.SIGTERM, signal.SIGUSR1), stop):
        yield


@contextmanager
def stop_on_signal(announce: Callable[[str], None]) -> Iterator[StopRequest]:
    """Handles the signals inside the block; outside the main thread Python cannot, and nothing is caught."""
    request = StopRequest(announce)
    with _handled(ASKING, request._on_signal):
        yield request


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
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
