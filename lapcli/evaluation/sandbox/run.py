"""Running a sample: two processes, each in a sandbox of its own, joined by a socket pair.

    candidate   executes the program and answers calls; sees neither the tests nor where the verdict goes
    tests       executes prompt and tests, and gives the verdict to us over a pipe

A sample that could not be started says nothing about the program: it is tried again, and then an error. After the start
everything that goes wrong is a failed sample.
"""

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import IO, Any

from lapcli.errors import LapError
from lapcli.evaluation.sandbox import interpreter
from lapcli.evaluation.sandbox.bubblewrap import wrapped
from lapcli.evaluation.sandbox.modes import Mode, bubblewrap
from lapcli.evaluation.sandbox.sample import Candidate, Limits, Verdict

START_SECONDS = 60.0
ATTEMPTS = 3
LONGEST_VERDICT = 16 << 10  # bytes


class NotStarted(LapError):
    """The sandbox did not come up; nothing is known about the program."""


class Stopped(LapError):
    """The evaluation was given up."""


def run_candidate(
    candidate: Candidate, mode: Mode, limits: Limits | None = None, stop: threading.Event | None = None
) -> Verdict:
    """The verdict on one sample. Raises only if the sandbox cannot be started; never for what the program does."""
    for attempt in range(ATTEMPTS):
        try:
            return _Sample(candidate, mode, limits or Limits(), stop or threading.Event()).verdict()
        except NotStarted:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("unreachable")


def run_all(
    candidates: Iterable[Candidate], mode: Mode, workers: int, limits: Limits | None = None
) -> Iterator[Verdict]:
    """The verdicts in the order of the samples, `workers` at a time. Whoever stops iterating stops the samples too."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(max(1, workers), thread_name_prefix="sandbox")
    try:
        waiting = [pool.submit(run_candidate, candidate, mode, limits, stop) for candidate in candidates]
        for future in waiting:
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _Sample:
    def __init__(self, candidate: Candidate, mode: Mode, limits: Limits, stop: threading.Event) -> None:
        self._candidate = candidate
        self._mode = mode
        self._limits = limits
        self._stop = stop
        self._received = b""

    def verdict(self) -> Verdict:
        began = time.monotonic()
        with ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile())
            try:
                processes, verdicts = self._start(stack, errors)
            except OSError as error:
                raise NotStarted(f"the sandbox could not be started: {error}") from error
            passed, reason = self._watch(*processes, verdicts, errors)
        return Verdict(passed, _printable(reason), time.monotonic() - began)

    def _start(self, stack: ExitStack, errors: IO[bytes]) -> tuple[list["_Process"], int]:
        ends = socket.socketpair()
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        processes = []
        try:
            given = tempfile.TemporaryFile("w+", encoding="ascii")
            with given:
                json.dump({name: getattr(self._candidate, name) for name in Candidate.__annotations__}, given)
                given.seek(0)
                for role, end, more in (("candidate", ends[0], {}), ("tests", ends[1], {"verdict": writing})):
                    process = self._process(role, end.fileno(), more, given if more else None, errors)
                    stack.callback(process.end)
                    processes.append(process)
        finally:
            for end in ends:
                end.close()
            os.close(writing)
        return processes, reading

    def _process(
        self, role: str, end: int, more: dict[str, int], given: IO[str] | None, errors: IO[bytes]
    ) -> "_Process":
        locked, bare = self._mode is not Mode.UNSAFE, self._mode is Mode.LANDLOCK
        order = {
            "role": role,
            "socket": end,
            **more,
            "confinement": {
                "memory": self._limits.memory,
                "cpu_seconds": self._limits.cpu_seconds,
                "lock": locked,
                "parent": os.getpid() if bare else None,
                "readable": list(interpreter.readable()) if bare else None,
            },
        }
        command = interpreter.command(json.dumps(order))
        if self._mode is Mode.BUBBLEWRAP:
            command = wrapped(bubblewrap() or "bwrap", command, interpreter.readable())
        return _Process(
            subprocess.Popen(
                command,
                stdin=given or subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[end, *more.values()],
                env=interpreter.environment(),
                cwd="/",
                start_new_session=True,
            )
        )

    def _watch(
        self, candidate: "_Process", tests: "_Process", verdicts: int, errors: IO[bytes]
    ) -> tuple[bool, str]:
        started = self._line(verdicts, START_SECONDS)
        if not started or "started" not in started:
            for process in (candidate, tests):
                process.end()
            errors.seek(0)
            said = errors.read(LONGEST_VERDICT).decode("utf-8", "replace").strip().splitlines()
            why = said[-1] if said else "no answer" if started is None else "it ended at once"
            raise NotStarted(f"the sandbox ({self._mode}) did not start: {_printable(why)}")
        found = self._line(verdicts, self._limits.wall_seconds)
        used = [process.end() for process in (candidate, tests)]
        if found is None:
            return False, "timeout"
        if not found or found.get("reason") == "ended":
            if max(used) >= self._limits.cpu_seconds:
                return False, "timeout"
            who = "program ended before it answered" if found else "tests ended without a verdict"
            return False, f"error: the {who}"
        return found["passed"] is True, found["reason"]

    def _line(self, verdicts: int, seconds: float) -> dict[str, Any] | None:
        """The next line of the tests' process; empty if it ended without one, none if the time is over."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if self._stop.is_set():
                raise Stopped("stopped")
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if not select.select([verdicts], [], [], min(left, 0.25))[0]:
                continue
            part = os.read(verdicts, 4096)
            if not part or len(self._received) > LONGEST_VERDICT:
                return {}
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        found = json.loads(line)
        return found if isinstance(found, dict) else {}


class _Process:
    """A process that leaves nothing behind."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._seconds: float | None = None

    def end(self) -> float:
        """Kills it with all that it started, and tells the processor time that it had."""
        if self._seconds is None:
            # The group is ours until we wait for its leader. In bubblewrap the sandbox dies with it.
            os.killpg(self._process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._seconds = usage.ru_utime + usage.ru_stime
        return self._seconds


def _printable(text: str) -> str:
    """What a program says about itself goes into a terminal and into files: one line, no control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)[:300]
