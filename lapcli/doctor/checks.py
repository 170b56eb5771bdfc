"""A check: a name, a function, and a finding that passes, warns or fails, with its number and next step.

The object that a check examines (a kernel, an optimizer) is an argument of its function, with the real one as the
default, so that tests can show that each check fails on a wrong one.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

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


@dataclass(frozen=True)
class Check:
    section: str
    name: str
    run: Callable[[], Finding]
    may_crash: bool = False  # a kernel that does not suit the processor can end its process


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
    """Yield each result as soon as it is known. A check that raises or ends its process has failed; the others run."""
    pool: ProcessPoolExecutor | None = None
    for check in checks:
        started = time.perf_counter()
        try:
            if check.may_crash and pool is None:
                # Spawned: a forked child could not use CUDA, which this process has already initialised.
                spawn, ending = multiprocessing.get_context("spawn"), (os.getpid(), signal.SIGKILL)
                pool = ProcessPoolExecutor(1, spawn, initializer=end_with_parent, initargs=ending)
            finding = pool.submit(check.run).result() if check.may_crash and pool else check.run()
        except BrokenProcessPool:
            pool = None
            # Virtual machines may report instructions (mostly AMX) that they do not have.
            finding = fails("it ended its process", f"set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or {REPORT}")
        except Exception as error:
            finding = fails(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", REPORT)
        yield Result(check.section, check.name, finding, time.perf_counter() - started)
    if pool is not None:
        pool.shutdown()
