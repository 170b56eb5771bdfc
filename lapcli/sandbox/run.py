"""Finds the sandbox that this machine offers, and runs samples in it.

A sample is two processes, each in a sandbox of its own, joined by a socket pair:

    candidate   executes the program and answers calls; sees neither the tests nor where the verdict goes
    tests       executes prompt and tests, and gives the verdict to us over a pipe

A sample that could not be started says nothing about the program: it is retried, and an error after the last attempt.
After the start everything that goes wrong is a failed sample.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import IO, Any

from lapcli.runtime.errors import LapError, UsageError
from lapcli.sandbox import command

START_SECONDS = 60.0  # until both processes have started
ATTEMPTS = 3  # to start a sample
LONGEST_VERDICT = 16 << 10  # bytes


class Mode(StrEnum):
    """How generated code is confined; the value is written to the results."""

    BUBBLEWRAP = (
        "bubblewrap"  # namespaces: no network, no host files but Python's own, no other processes; the filter too
    )
    LANDLOCK = "landlock+seccomp"  # the same filter, files by Landlock, no capabilities; needs no privileges
    UNSAFE = "unsafe: no sandbox"  # limits on time and memory only


@dataclass(frozen=True)
class Candidate:
    """A program written by a model, and the tests hidden from it.

    The tests are executed after the prompt, whose helpers they may use, and define `check(candidate)`.
    """

    prompt: str  # the data set's: imports, helpers, the function's head
    program: str  # all of the model's program, ready to execute
    test: str
    entry_point: str  # name of the function


@dataclass(frozen=True)
class ProgramVerdict:
    passed: bool
    reason: str  # "passed", "wrong answer", "timeout", "memory", "error: ..."
    seconds: float  # from start to verdict


@dataclass(frozen=True)
class Limits:
    """The limits of each of the two processes.

    CPU time is the main limit, so that no program fails because the machine is busy; the wall-time limit catches
    programs that wait.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    memory: int = 512 << 20  # bytes of address space


class NotStarted(LapError):
    """The sandbox did not start; nothing is known about the program."""


class Stopped(LapError):
    """The evaluation was stopped."""


def run_candidate(
    candidate: Candidate, mode: Mode, limits: Limits | None = None, stop: threading.Event | None = None
) -> ProgramVerdict:
    """Return the verdict on one sample. Raise only if the sandbox cannot be started; never for what the program
    does."""
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
) -> Iterator[ProgramVerdict]:
    """Yield the verdicts in the order of the samples, `workers` at a time. Closing the iterator stops the samples."""
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

    def verdict(self) -> ProgramVerdict:
        began = time.monotonic()
        with ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile())
            try:
                candidate, tests, verdicts = self._start(stack, errors)
            except OSError as error:
                raise NotStarted(f"the sandbox ({self._mode}) could not be started: {error}") from error
            passed, reason = self._watch(candidate, tests, verdicts, errors)
        return ProgramVerdict(passed, _printable(reason), time.monotonic() - began)

    def _start(self, stack: ExitStack, errors: IO[bytes]) -> tuple["_Process", "_Process", int]:
        """Start both processes, which end with `stack`; the third value is the descriptor that the verdict is read
        from."""
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        with ExitStack() as handed_over:  # our copies; while we hold one, no reader would see an end of file
            handed_over.callback(os.close, writing)
            one, other = (handed_over.enter_context(end) for end in socket.socketpair())
            task = handed_over.enter_context(tempfile.TemporaryFile("w+", encoding="ascii"))
            json.dump(asdict(self._candidate), task)
            task.seek(0)
            candidate = self._process({"role": "candidate", "socket": one.fileno()}, None, errors)
            stack.callback(candidate.end)
            tests = self._process({"role": "tests", "socket": other.fileno(), "verdict": writing}, task, errors)
            stack.callback(tests.end)
        return candidate, tests, reading

    def _process(self, order: dict[str, Any], task: IO[str] | None, errors: IO[bytes]) -> "_Process":
        alone = self._mode is Mode.LANDLOCK  # no bubblewrap around it: the process has to confine itself
        order["confinement"] = {
            "memory": self._limits.memory,
            "cpu_seconds": self._limits.cpu_seconds,
            "lock": self._mode is not Mode.UNSAFE,
            "parent": os.getpid() if alone else None,
            "readable": list(command.readable()) if alone else None,
        }
        words = command.python(json.dumps(order))
        if self._mode is Mode.BUBBLEWRAP:
            words = command.in_bubblewrap(words)
        return _Process(
            subprocess.Popen(
                words,
                stdin=task or subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[order[name] for name in ("socket", "verdict") if name in order],
                env=command.environment(),
                cwd="/",
                start_new_session=True,
            )
        )

    def _watch(self, candidate: "_Process", tests: "_Process", verdicts: int, errors: IO[bytes]) -> tuple[bool, str]:
        started = self._line(verdicts, START_SECONDS)
        if not started or "started" not in started:
            errors.seek(0)
            said = errors.read(LONGEST_VERDICT).decode("utf-8", "replace").strip().splitlines()
            why = said[-1] if said else "no answer" if started is None else "it ended at once"
            raise NotStarted(f"the sandbox ({self._mode}) did not start: {_printable(why)}")
        verdict = self._line(verdicts, self._limits.wall_seconds)
        used = [process.end() for process in (candidate, tests)]
        if verdict is None:
            return False, "timeout"
        if not verdict or verdict.get("reason") == "ended":
            # The kernel ends a process by counted ticks, which on a busy machine run well ahead of the time it reports.
            if max(used) >= 0.5 * self._limits.cpu_seconds:
                return False, "timeout"
            who = "program ended before it answered" if verdict else "tests ended without a verdict"
            return False, f"error: the {who}"
        return verdict["passed"] is True, verdict["reason"]

    def _line(self, verdicts: int, seconds: float) -> dict[str, Any] | None:
        """Return the next line of the tests' process; empty if it ended without one, None at a timeout.

        Time is counted in short turns, so that no program fails because the evaluation itself was suspended.
        """
        turn = 0.25
        while b"\n" not in self._received:
            if self._stop.is_set():
                raise Stopped("the evaluation was stopped")
            began = time.monotonic()
            if not _readable(verdicts, min(seconds, turn)):
                seconds -= min(time.monotonic() - began, 2 * turn)
                if seconds <= 0:
                    return None
                continue
            chunk = os.read(verdicts, 4096)
            if not chunk or len(self._received) > LONGEST_VERDICT:
                return {}
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}


class _Process:
    """A process that is removed with all its children."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._seconds: float | None = None

    def end(self) -> float:
        """Kill the process with all its children, and return the processor time that they used."""
        if self._seconds is None:
            # The process inside is killed first, so that bubblewrap still reaps it. Bubblewrap killed first would leave
            # its child to init, and a container often has none.
            if not (_kill_children(self._process.pid) and _ends(self._process.pid)):
                with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for ended processes
                    # The group's number cannot be reused before its leader has been waited for.
                    os.killpg(self._process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._seconds = usage.ru_utime + usage.ru_stime
        return self._seconds


def _kill_children(parent: int) -> bool:
    """Kill the children of a process; return whether there was one.

    A child's handle is opened before its parent is checked again, because process numbers are reused.
    """
    children = _children(parent)
    killed = False
    for child in children:
        try:
            handle = os.pidfd_open(child)
        except OSError:
            continue
        try:
            if child in _children(parent):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                killed = True
        except ProcessLookupError:
            killed = True
        finally:
            os.close(handle)
    return killed


def _children(parent: int) -> list[int]:
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _ends(process: int, seconds: float = 5.0) -> bool:
    """Wait for a process; return whether it ended within that time."""
    handle = os.pidfd_open(process)
    try:
        return _readable(handle, seconds)
    finally:
        os.close(handle)


def _readable(descriptor: int, seconds: float) -> bool:
    """Return whether there is something to read within that time. `poll`, because `select` takes no descriptors beyond
    1,023."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def _printable(text: str) -> str:
    """Make a program's own message safe for terminals and files: one line, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)[:300]


WARNING = (
    "WARNING: generated code runs WITHOUT A SANDBOX, as you, on your files and your network. The result will say so."
)


def choose_mode(allow_unsafe: bool) -> Mode:
    """Return the safest mode that works here. If none does: the unsafe one with a warning, if it is allowed, else an
    error."""
    problems = []
    for mode in (Mode.BUBBLEWRAP, Mode.LANDLOCK):
        problem = probe(mode)
        if problem is None:
            return mode
        problems.append(f"{mode}: {problem}")
    if allow_unsafe:
        print(WARNING, *problems, sep="\n  ", file=sys.stderr)
        return Mode.UNSAFE
    raise UsageError(
        "generated code needs a sandbox, and this machine offers none: install bubblewrap "
        "(`apt-get install bubblewrap`, `dnf install bubblewrap`), use Linux 5.13 or newer with Landlock and seccomp, "
        "or accept the risk with --unsafe-code-execution (" + "; ".join(problems) + ")"
    )


# A sample like any other, whose answer is right only if the sandbox holds: no host files, no network, no processes.
_PROBE = Candidate(
    prompt="",
    program="""
import os, socket

def attempts():
    held = []
    for attempt in (
        lambda: os.listdir(os.path.expanduser("~root") if os.getuid() == 0 else "/home"),
        lambda: open("/etc/passwd"),
        lambda: open("/tmp/probe", "w"),
        lambda: socket.socket(),
        lambda: os.fork(),
        lambda: os.kill(os.getppid(), 0),
    ):
        try:
            attempt()
            held.append(False)
        except OSError:
            held.append(True)
    return held
""",
    test="def check(candidate):\n    assert all(candidate())\n",
    entry_point="attempts",
)


@cache
def probe(mode: Mode) -> str | None:
    """Try a mode on this machine with one sample; return what is wrong with it, or None if it works."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if mode is Mode.BUBBLEWRAP and command.bubblewrap() is None:
        return "bwrap is not installed"
    try:
        verdict = run_candidate(_PROBE, mode)
    except LapError as error:
        return str(error)
    return None if verdict.passed else f"the sandbox does not hold ({verdict.reason})"
