"""SIGTERM, SIGINT and SIGUSR1 ask a run to stop: it finishes its step, saves, and exits with 75."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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
def stop_on_signal(announce: Callable[[str], None]) -> Iterator[StopRequest]:
    """Handles the signals inside the block; outside the main thread Python cannot, and nothing is caught."""
    request = StopRequest(announce)
    before = {}
    try:
        for number in ASKING:
            before[number] = signal.signal(number, request._on_signal)
    except ValueError:
        pass
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
