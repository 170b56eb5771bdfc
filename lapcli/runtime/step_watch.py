"""Ends a run whose ranks wait for one that does not answer, and names that rank.

A rank that hangs (SIGSTOP, a stuck driver, a disk that does not answer) closes no connection: the collectives of the
others would wait for half an hour and then fail without naming it. Here a thread of every rank writes a heartbeat with
its step into the store, and reads that of the next rank. Two things end the run:

    a step takes too long                          not the first one, which compiles; saving is not part of a step
    a rank's heartbeat stops for as long           whatever it should be doing

The rank that notices reads the heartbeats of all ranks twice, names those that did not change, and tells the others.
All ranks exit; the launcher kills one that cannot, and restarts them if --max-restarts allows it. The main thread
cannot do any of this, since it waits inside a collective.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from lapcli.runtime.errors import ExitCode
from lapcli.runtime.ranks import World

LONGEST_PERIOD = 5.0  # seconds between two heartbeats of a rank
PERIODS_BETWEEN_CHECKS = 5  # periods between two looks at the heartbeats
TOLD, FIRST = "told", "first"  # keys of the store besides the ranks' numbers

T = TypeVar("T")


@dataclass(frozen=True)
class Heartbeat:
    """The heartbeat that a rank writes into the store; `count` grows each time, so that no clocks are compared."""

    rank: int
    host: str
    pid: int
    count: int = 0
    step: int = 0
    is_reading: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class StepWatch:
    """Watches the steps of a run; on rank 0 `report` is called with the reason why it ended."""

    def __init__(self, world: World, report: Callable[[str], None]) -> None:
        self._world, self._report = world, report
        self._seconds = 60 * world.step_timeout
        self._period = min(LONGEST_PERIOD, self._seconds / 10)  # at least ten heartbeats within the timeout
        self._heartbeat = Heartbeat(world.rank, socket.gethostname(), os.getpid())
        self._timed_step: int | None = None
        self._next_heartbeat = ""  # of the next rank, as last read
        self._rounds = 0  # of this rank's heartbeat thread; it stops counting if the store does not answer
        self._is_over = threading.Event()
        self._is_lost = False

    def __enter__(self) -> "StepWatch":
        if self._world.size > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=5))
            self._store = dist.PrefixStore("steps", store)
            if self._world.is_main:  # the store may be torchrun's own, which outlives a restart
                for key in (TOLD, FIRST):
                    self._store.delete_key(key)
            self._write()
            self._world.barrier()  # the other ranks' keys exist after this
            # Two threads: the first blocks when the store does not answer, which only the second can notice.
            for work in (self._send_heartbeats, self._keep_watch):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._is_lost:  # the error that ends the block follows from the lost rank, which has been reported
            os._exit(ExitCode.FAILED)

    @contextmanager
    def step(self, number: int, is_timed: bool) -> Iterator[None]:
        """Mark a step and its collectives; with `is_timed` it may take no longer than the timeout."""
        # A new frozen heartbeat each time, so that the threads can read it without a lock.
        self._heartbeat = replace(self._heartbeat, step=number)
        self._timed_step = number if is_timed else None
        try:
            yield
        finally:
            self._timed_step = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark the part of a step in which a rank reads its batch."""
        self._heartbeat = replace(self._heartbeat, is_reading=True)
        try:
            yield
        finally:
            self._heartbeat = replace(self._heartbeat, is_reading=False)

    def _write(self) -> None:
        self._store.set(str(self._world.rank), json.dumps(asdict(replace(self._heartbeat, count=self._rounds))))

    def _send_heartbeats(self) -> None:
        next_one = str((self._world.rank + 1) % self._world.size)
        with suppress(RuntimeError):  # the store ends with rank 0
            while not self._is_over.wait(self._period):
                self._rounds += 1
                self._write()
                self._next_heartbeat = self._store.get(next_one).decode()
                if self._store.check([TOLD]):
                    self._follow(self._store.get(TOLD).decode())

    def _keep_watch(self) -> None:
        """Count time in periods of this thread, not by the clock: it stands still when the whole job is suspended."""
        step, in_step, known, silent = None, 0.0, ("", 0), 0.0
        while not self._is_over.wait(self._period):
            in_step = in_step + self._period if step is not None and step == self._timed_step else 0.0
            silent = silent + self._period if self._next_heartbeat == known[0] or self._rounds == known[1] else 0.0
            step, known = self._timed_step, (self._next_heartbeat, self._rounds)
            if max(in_step, silent) < self._seconds or self._is_lost:
                continue
            before = self._look()
            time.sleep(PERIODS_BETWEEN_CHECKS * self._period)
            missing, words = explain(before, self._look())
            if not self._is_over.is_set() and (missing or (in_step >= self._seconds and step == self._timed_step)):
                self._end(missing, words)

    def _look(self) -> list[Heartbeat] | None:
        """Read the heartbeats of all ranks; None if the store does not answer."""
        ranks = [str(rank) for rank in range(self._world.size)]
        texts = self._ask(lambda: self._store.multi_get(ranks))
        return None if texts is None else [Heartbeat(**json.loads(text)) for text in texts]

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the store's answer; None if it takes too long, as when rank 0, which holds the store, hangs."""
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PERIODS_BETWEEN_CHECKS * self._period)
        return answers[0] if answers else None

    def _end(self, missing: set[int], words: str) -> None:
        """End the run. One rank prints the reason; the others wait for it, so that no lost connection precedes it."""
        # The store counts atomically: the rank that gets 1 prints. Without an answer it is the lowest one left.
        first = self._ask(lambda: self._store.add(FIRST, 1))
        others = set(range(self._world.size)) - missing
        if first not in (None, 1) or (first is None and self._world.rank != min(others, default=0)):
            self._is_lost = True
            time.sleep(3 * PERIODS_BETWEEN_CHECKS * self._period)
            os._exit(ExitCode.FAILED)
        minutes = f"{self._world.step_timeout:g} minute{'s' if self._world.step_timeout != 1 else ''}"
        sentence = (
            f"no progress for {minutes} at step {self._heartbeat.step}: {words}. The same command resumes from the "
            "last checkpoint; --step-timeout gives a step more time"
        )
        print(f"lap: {sentence}", file=sys.stderr, flush=True)
        self._is_lost = True
        self._ask(lambda: self._store.set(TOLD, sentence))
        self._follow(sentence)

    def _follow(self, sentence: str) -> None:
        self._is_lost = True
        if self._world.is_main:
            with suppress(OSError):
                self._report(sentence)
        time.sleep(2 * self._period)  # until all ranks know
        os._exit(ExitCode.FAILED)


def explain(before: list[Heartbeat] | None, after: list[Heartbeat] | None) -> tuple[set[int], str]:
    """Return the ranks that do not answer, and the reason in words, from two looks at the heartbeats of all ranks."""
    if before is None or after is None:
        return {0}, "rank 0 does not answer"
    silent = [heartbeat for heartbeat, earlier in zip(after, before, strict=True) if heartbeat.count == earlier.count]
    if silent:
        names = ", ".join(f"{heartbeat} does not answer, it was at step {heartbeat.step}" for heartbeat in silent)
        return {heartbeat.rank for heartbeat in silent}, names
    last = max(heartbeat.step for heartbeat in after)
    if behind := [heartbeat for heartbeat in after if heartbeat.step < last]:
        return set(), ", ".join(f"{heartbeat} is still at step {heartbeat.step}" for heartbeat in behind)
    if reading := [heartbeat for heartbeat in after if heartbeat.is_reading]:
        return set(), ", ".join(f"{heartbeat} is still reading its batch" for heartbeat in reading)
    return set(), "all ranks answer and none is behind, so a device or the network between them is stuck"
