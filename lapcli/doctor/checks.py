"""The parts of a check: a name, a function, and a finding that passes, warns or fails, with its number and next step.

The object that a check examines (a kernel, an optimizer, a command) is an argument of its function, with the real one
as the default, so that tests can show that each check fails on a wrong one.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from lapcli.runtime.devices import NO_AMX
from lapcli.runtime.signals import end_with_parent
from lapcli.runtime.tables import wrapped

REPORT = "report it with the output of `lap doctor --json`"


class Status(StrEnum):
    PASSES = "passes"
    WARNS = "warns"
    FAILS = "fails"


@dataclass(frozen=True)
class Finding:
    """The result of a check: one sentence with its number, and what to do if it does not pass."""

    status: Status
    text: str
    next_step: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def passes(text: str, **numbers: Any) -> Finding:
    return Finding(Status.PASSES, text, "", numbers)


def warns(text: str, next_step: str, **numbers: Any) -> Finding:
    return Finding(Status.WARNS, text, next_step, numbers)


def fails(text: str, next_step: str, **numbers: Any) -> Finding:
    return Finding(Status.FAILS, text, next_step, numbers)


def within(error: float, limit: float, what: str, next_step: str) -> Finding:
    """Pass if an error is at most its limit; NaN fails."""
    numbers = {"error": error, "limit": limit}
    if error <= limit:
        return passes(f"{what}: error {error:.1e} of at most {limit:.0e}", **numbers)
    return fails(f"{what}: error {error:.1e}, more than {limit:.0e}", next_step, **numbers)


@dataclass(frozen=True)
class Check:
    section: str
    name: str
    run: Callable[[], Finding]
    is_needed: bool = True  # if not, a failure is a warning: no run does this by default


@dataclass(frozen=True)
class Result:
    section: str
    name: str
    finding: Finding
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"section": self.section, "name": self.name, **asdict(self.finding), "seconds": round(self.seconds, 3)}

    def to_text(self) -> str:
        """Format a line, wrapped to the terminal's width, and below it the next step, if there is one."""
        lines = wrapped(self.finding.text, f"{self.finding.status:<8}{self.name:<29}")
        if self.finding.next_step:
            lines += wrapped(f"next: {self.finding.next_step}", " " * 8)
        return "\n".join(lines)


def examine(checks: Iterable[Check]) -> Iterator[Result]:
    """Yield each result as soon as it is known; a check that raises has failed, and the others still run."""
    for check in checks:
        started = time.perf_counter()
        try:
            finding = check.run()
        except Exception as error:
            reason = str(error).strip().splitlines()
            finding = fails(f"{type(error).__name__}: {reason[0] if reason else 'no message'}", REPORT)
        yield _result(check, finding, time.perf_counter() - started)


def _result(check: Check, finding: Finding, seconds: float) -> Result:
    if finding.status is Status.FAILS and not check.is_needed:
        finding = replace(finding, status=Status.WARNS)
    return Result(check.section, check.name, finding, seconds)


def examine_apart(build: Callable[[], list[Check]]) -> Iterator[Result]:
    """Run the checks in a process of its own, where `build` makes them again: a kernel that does not suit a processor
    can end the process. The check that did so has failed, and the next ones run in another process."""
    # A forked child could not use CUDA, which this process has already initialised.
    spawn, checks, done = multiprocessing.get_context("spawn"), build(), 0
    while done < len(checks):
        receiver, sender = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_examine_from, args=(build, done, sender), daemon=True)
        child.start()
        sender.close()  # our copy: while it is open, `recv` would wait for ever for a child that has ended
        started = time.perf_counter()
        try:
            while done < len(checks):
                yield receiver.recv()
                done += 1
                started = time.perf_counter()
        except EOFError:
            child.join()
            code = child.exitcode or 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            next_step = NO_AMX if code == -signal.SIGILL else REPORT
            finding = fails(f"the process that computed it {how}", next_step, exit_code=code)
            yield _result(checks[done], finding, time.perf_counter() - started)
            done += 1
        finally:
            # Also reached when the caller stops iterating.
            child.kill()
            child.join()


def _examine_from(build: Callable[[], list[Check]], first: int, sender: Connection) -> None:
    end_with_parent(os.getppid(), signal.SIGKILL)
    for result in examine(build()[first:]):
        sender.send(result)
