"""Ends a step in which the ranks wait in vain for one of them, and says which.

A rank that is stopped (SIGSTOP, a stuck driver, a disk that does not answer) closes no connection: the collectives of
the others would wait for half an hour and then fail without a word about it. Here every rank writes its step into the
store again and again, from a thread. A rank whose step takes too long looks twice at what all of them wrote: whoever
wrote nothing in between is missing. Then it ends itself; the launcher ends the rest, and starts them again if it may.

The main thread cannot be told, since it waits inside the collective.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lapcli.runtime.errors import ExitCode
from lapcli.runtime.ranks import World

LONGEST_PERIOD = 5.0  # seconds between two lines of a rank
LOOKS_APART = 3  # periods


@dataclass(frozen=True)
class Sign:
    """What a rank writes into the store; `count` grows with every line, so that no clocks are compared."""

    rank: int
    host: str
    pid: int
    count: int = 0
    step: int = 0
    is_reading: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class StepWatch:
    """Watches the steps of a run; `report` gets the sentence that says why it ended, on rank 0."""

    def __init__(self, world: World, report: Callable[[str], None]) -> None:
        self._world, self._report = world, report
        self._seconds = 60 * world.step_timeout
        self._period = min(LONGEST_PERIOD, self._seconds / 10)
        self._sign = Sign(world.rank, socket.gethostname(), os.getpid())
        self._step = 0
        self._began: float | None = None  # of the step that is timed
        self._is_reading = False
        self._is_over = threading.Event()
        self._is_lost = False

    def __enter__(self) -> "StepWatch":
        if self._world.size > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=5))
            self._store = dist.PrefixStore("steps", store)
            self._write()  # before the first step, so that every rank is there when another one looks
            for work in (self._write_again_and_again, self._look_at_the_clock):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._is_lost:  # and said by another rank: this is the error that follows from it
            os._exit(ExitCode.FAILED)

    @contextmanager
    def step(self, number: int, is_timed: bool) -> Iterator[None]:
        """A step and its collectives; the first one compiles, and may take as long as it likes."""
        self._step = number
        self._began = time.monotonic() if is_timed else None
        try:
            yield
        finally:
            self._began = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The part of a step in which a rank gets its batch."""
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def _write(self) -> None:
        self._sign = Sign(
            self._world.rank, self._sign.host, self._sign.pid, self._sign.count + 1, self._step, self._is_reading
        )
        self._store.set(str(self._world.rank), json.dumps(asdict(self._sign)))

    def _write_again_and_again(self) -> None:
        with suppress(RuntimeError):  # the store ends with rank 0
            while not self._is_over.wait(self._period):
                self._write()

    def _look_at_the_clock(self) -> None:
        while not self._is_over.wait(self._period):
            began = self._began
            if began is None or time.monotonic() - began < self._seconds:
                continue
            before = self._signs()
            time.sleep(LOOKS_APART * self._period)
            after = self._signs()
            if self._began == began and not self._is_over.is_set():
                self._end(before, after)

    def _signs(self) -> list[Sign] | None:
        """Of all ranks; none if the store does not answer."""
        found: list[Sign] = []

        def read() -> None:
            with suppress(RuntimeError):
                texts = self._store.multi_get([str(rank) for rank in range(self._world.size)])
                found.extend(Sign(**json.loads(text)) for text in texts)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(LOOKS_APART * self._period)
        return found if len(found) == self._world.size else None

    def _end(self, before: list[Sign] | None, after: list[Sign] | None) -> None:
        missing, words = explain(before, after)
        speaker = min(set(range(self._world.size)) - missing, default=0)
        if self._world.rank != speaker:  # who may not have got so far; its end ends the collective here
            self._is_lost = True
            time.sleep(2 * LOOKS_APART * self._period)
            os._exit(ExitCode.FAILED)
        minutes = f"{self._world.step_timeout:g} minute{'s' if self._world.step_timeout != 1 else ''}"
        sentence = (
            f"step {self._step} has taken more than {minutes}: {words}. The same command resumes from the last "
            "checkpoint; --step-timeout gives a step more time"
        )
        print(f"lap: {sentence}", file=sys.stderr, flush=True)
        if self._world.is_main:
            with suppress(OSError):
                self._report(sentence)
        os._exit(ExitCode.FAILED)


def explain(before: list[Sign] | None, after: list[Sign] | None) -> tuple[set[int], str]:
    """The ranks that are missing, and in words what is known, from two looks at what all ranks wrote."""
    if before is None or after is None:
        return {0}, "rank 0 does not answer"
    silent = [sign for sign, earlier in zip(after, before, strict=True) if sign.count == earlier.count]
    if silent:
        names = ", ".join(f"{sign} does not answer, it was at step {sign.step}" for sign in silent)
        return {sign.rank for sign in silent}, names
    last = max(sign.step for sign in after)
    if behind := [sign for sign in after if sign.step < last]:
        return set(), ", ".join(f"{sign} is still at step {sign.step}" for sign in behind)
    if reading := [sign for sign in after if sign.is_reading]:
        return set(), ", ".join(f"{sign} is still reading its batch" for sign in reading)
    return set(), "all ranks answer and none is behind, so a device or the network between them is stuck"
