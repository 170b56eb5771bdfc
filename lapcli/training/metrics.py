"""`metrics.jsonl`: one JSON object per line, each step once despite interruptions and resumes; and its clock.

Times are seconds of wall time on rank 0. `seconds` is the time of a step, from the previous end to its own
end; throughput is computed from it. In the first step of a process, which compiles and warms up, it is called
`seconds_first_step`. `seconds_validating` and `seconds_saving` are the times since the previous line. All of them add
up to the total.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.runtime.errors import LapError
from lapcli.runtime.files import append, flush_to_disk

if TYPE_CHECKING:  # a report reads metrics without torch
    import torch


#: Trackers, called on rank 0 with the file and each added line.
listeners: list[Callable[[Path, dict[str, Any]], None]] = []


class MetricsLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int, warn: Callable[[str], None]) -> list[dict[str, Any]]:
        """Return the lines up to `step` and remove later ones, whose steps are repeated, from the file.

        A damaged line is reported and skipped, and stays in the file.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        good: list[dict[str, Any]] = []
        size = 0
        for number, text in enumerate(content.splitlines(keepends=True), start=1):
            line = parse_line(text)
            # Lines are in the order of steps. An incomplete last line was being written when the run was killed.
            if (line is not None and line["step"] > step) or not text.endswith(b"\n"):
                break
            size += len(text)
            if line is None:
                warn(f"{self.path}:{number} is damaged and skipped")
            else:
                good.append(line)
        if size < len(content):
            os.truncate(self.path, size)
        if step and not good:
            warn(f"{self.path} has no lines up to step {step}: losses and validations so far are lost")
        return good

    def flush(self) -> None:
        """Flush the file to disk, before a checkpoint that covers its lines."""
        if self.path.exists():
            flush_to_disk(self.path)

    def append(self, line: dict[str, Any]) -> None:
        """Append in a single write, so that a kill leaves at most one unfinished line, which the next start drops."""
        try:
            append(self.path, (json.dumps(line) + "\n").encode())
        except OSError as error:
            raise LapError(
                f"cannot write {self.path} ({error.strerror}); make room, then run the same command to resume"
            ) from error
        for listener in listeners:
            listener(self.path, line)


class StepClock:
    """Divides wall time into steps and the work between them.

    Only the end of a step is measured: a GPU works asynchronously, so the time between two calls within a step says
    little. On a GPU the end is the step's only sync, before its update, so the time of a step includes the previous
    update.
    """

    now: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._is_first = True
        self._between: dict[str, float] = {}
        self._last_end = self.now()

    @contextlib.contextmanager
    def between_steps(self, what: str) -> Iterator[None]:
        """Count the block's time for `what` instead of a step; GPU work pending before it counts for the step."""
        self._finish_work()
        began = self.now()
        yield
        self._finish_work()
        spent = self.now() - began
        self._between[what] = self._between.get(what, 0.0) + spent
        self._last_end += spent

    def end_step(self, units: int, unit: str) -> dict[str, float]:
        """Return the times of the step that has just ended, for its line, with the throughput from `units` per step."""
        end = self.now()
        seconds, self._last_end = end - self._last_end, end
        times = {"seconds_first_step": seconds}
        if not self._is_first:
            times = {f"{unit}_per_second": units / seconds, "seconds": seconds}
        self._is_first = False
        return times | self.since_last_line()

    def since_last_line(self) -> dict[str, float]:
        """Return the times of work between steps, for the next line, and reset them."""
        spent, self._between = self._between, {}
        return {f"seconds_{what}": seconds for what, seconds in spent.items()}

    def _finish_work(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a line that the same recipe and seed reproduce."""
    return {name: value for name, value in line.items() if not name.startswith("seconds") and "per_second" not in name}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file, without an incomplete last line."""
    content = path.read_bytes() if path.is_file() else b""
    return [line for text in content.splitlines() if (line := parse_line(text)) is not None]


def last_step_metrics(path: Path) -> dict[str, Any]:
    """Return the last complete line of a training step, {} if there is none."""
    lines: list[bytes] = path.read_bytes().splitlines() if path.is_file() else []
    parsed = (parse_line(text) for text in reversed(lines) if b'"loss"' in text)
    return next((line for line in parsed if line is not None), {})


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics; None for a partially written or partially read line."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
