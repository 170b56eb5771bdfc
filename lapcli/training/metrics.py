"""`metrics.jsonl`: one object a line, each step once, whatever happened in between; and the clock of its times.

Times are seconds of wall time on rank 0. `seconds` is a step, from the end of the one before to its own end, and what
throughput is of. `seconds_first_step` stands instead of it in the first step of a process, which compiles and warms up;
`seconds_validating` and `seconds_saving` are of what was done since the line before. They add up to the whole.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.runtime.errors import LapError
from lapcli.runtime.files import write_text

if TYPE_CHECKING:  # a report reads metrics without torch
    import torch


class MetricsLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> list[dict[str, Any]]:
        """Drops what a killed process wrote beyond `step`, and a last line it did not finish."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        if self.path.exists():
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        return kept

    def append(self, line: dict[str, Any]) -> None:
        """In one write, so that a kill leaves at most one unfinished line, which the next start drops."""
        data = (json.dumps(line) + "\n").encode()
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(handle, data)
            finally:
                os.close(handle)
        except OSError as error:
            raise LapError(
                f"cannot write {self.path} ({error}); make room, then run the same command to go on"
            ) from error
        if written != len(data):
            raise LapError(
                f"cannot write {self.path} (the disk is full); make room, then run the same command to go on"
            )


class StepClock:
    """Divides wall time into steps and what is done between them, without a rest.

    The end of a step is the only moment of it that is the same in each: a GPU works on after the calls that told it to,
    so the time between two calls within a step says little.
    """

    now: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._is_first = True
        self._between: dict[str, float] = {}
        self._last_end = self.now()

    @contextlib.contextmanager
    def between_steps(self, what: str) -> Iterator[None]:
        """Inside, time is `what`'s and no step's. The GPU's work on the step before is not."""
        self._finish_work()
        began = self.now()
        yield
        self._finish_work()
        spent = self.now() - began
        self._between[what] = self._between.get(what, 0.0) + spent
        self._last_end += spent

    def end_step(self, units: int, unit: str) -> dict[str, float]:
        """The times of a step that has just ended, for its line, with the throughput in `units` a step."""
        end = self.now()
        seconds, self._last_end = end - self._last_end, end
        times = {"seconds_first_step": seconds}
        if not self._is_first:
            times = {f"{unit}_per_second": units / seconds, "seconds": seconds}
        self._is_first = False
        return times | self.since_last_line()

    def since_last_line(self) -> dict[str, float]:
        """What was done between steps, for the next line."""
        spent, self._between = self._between, {}
        return {f"seconds_{what}": seconds for what, seconds in spent.items()}

    def _finish_work(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """What a run gives again with the same recipe and seed."""
    return {name: value for name, value in line.items() if not name.startswith("seconds") and "per_second" not in name}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines; a torn last one is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
