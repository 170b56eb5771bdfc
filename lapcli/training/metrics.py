"""`metrics.jsonl`: one JSON object per line, each step once, whatever was interrupted and resumed; and its clock.

Times are seconds of wall time on rank 0. `seconds` is the time of a step, from the end of the one before to its own
end; throughput is computed from it. In the first step of a process, which compiles and warms up, it is called
`seconds_first_step`. `seconds_validating` and `seconds_saving` are the times since the line before. All of them add up
to the total.

Each checkpoint and `run.json` have a record of the file at that time: its size and its sha256. The file only grows, so
a record is verified against the beginning of the file, and a line that was changed or lost is noticed.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.runs import Run
from lapcli.runtime.errors import DataError, LapError
from lapcli.runtime.files import append, flush_to_disk, open_to_read, read_bytes, truncate

_TAIL = 8192  # bytes, enough for the last lines of a file unless a validation has a number for each head
_REMEDY = "restore it from a backup, or remove it to do without the record of the steps so far"
Record = dict[str, Any]  # {"bytes": 1157, "sha256": "..."}

if TYPE_CHECKING:  # a report reads metrics without torch
    import torch


class MetricsLog:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes, self._hash = 0, hashlib.sha256()  # of the lines written or verified

    def read_until(self, step: int, records: Sequence[Record]) -> list[dict[str, Any]]:
        """Return the lines up to `step`; DataError if the beginning of the file does not match one of its records.

        Lines beyond the records are those of a process that was killed: they are skipped, and `drop_rest` removes
        them. Without any record (version 0.1) all complete lines count.
        """
        content = read_bytes(self.path) if self.path.exists() else b""
        for record in records:
            verify_metrics(self.path, content, record)
        known = max((int(record["bytes"]) for record in records), default=len(content))
        self._bytes, self._hash = 0, hashlib.sha256()
        good: list[dict[str, Any]] = []
        for text in content[:known].splitlines(keepends=True):
            line = parse_line(text)
            # Each line is one write, so only the last can be unfinished: a broken line before it is damage.
            if line is None and self._bytes + len(text) < known:
                raise DataError(f"{self.path} is damaged: line {len(good) + 1} is not JSON; {_REMEDY}")
            # Lines are in the order of steps: the first one beyond the checkpoint ends what is kept.
            if line is None or not text.endswith(b"\n") or line["step"] > step:
                break
            good.append(line)
            self._count(text)
        return good

    def drop_rest(self) -> None:
        """Truncate the file after the lines that `read_until` returned."""
        if self.path.exists():
            truncate(self.path, self._bytes)

    def record(self) -> Record:
        """Flush the file to disk and return its record, to be verified later."""
        if self.path.exists():
            flush_to_disk(self.path)
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def append(self, line: dict[str, Any]) -> None:
        """Append in a single write, so that a kill leaves at most one unfinished line, which the next start drops."""
        data = (json.dumps(line) + "\n").encode()
        try:
            append(self.path, data)
        except OSError as error:
            raise LapError(
                f"cannot write {self.path} ({error.strerror}); make room, then run the same command to resume"
            ) from error
        self._count(data)  # after the write, so that a record never covers a line that the file does not have

    def _count(self, data: bytes) -> None:
        self._bytes += len(data)
        self._hash.update(data)


def verify_metrics(path: Path, content: bytes, record: Record) -> None:
    """Raise DataError if the beginning of the file is not what was recorded."""
    size = int(record["bytes"])
    if hashlib.sha256(content[:size]).hexdigest() != record["sha256"]:
        raise DataError(f"{path} is damaged: its first {size:,} bytes are not what was written; {_REMEDY}")


class StepClock:
    """Divides all wall time into steps and the work between them.

    Only the end of a step is measured: a GPU works asynchronously, so the time between two calls within a step says
    little. On a GPU the end is the step's one wait, before its update, so the time of a step includes the update of the
    step before.
    """

    now: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._is_first = True
        self._between: dict[str, float] = {}
        self._last_end = self.now()

    @contextlib.contextmanager
    def between_steps(self, what: str) -> Iterator[None]:
        """Count the block's time for `what` and not for a step; GPU work pending before it counts for the step."""
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
    """Return the complete lines of a file, without an unfinished last one."""
    if not path.is_file():
        return []
    return parse_metrics(read_bytes(path))


def parse_metrics(content: bytes) -> list[dict[str, Any]]:
    return [line for text in content.splitlines() if (line := parse_line(text)) is not None]


def last_step_metrics(path: Path) -> dict[str, Any]:
    """Return the last complete line of a training step, {} if there is none, without reading the whole file."""
    try:
        with open_to_read(path) as file:
            size, tail = path.stat().st_size, _TAIL
            while True:
                file.seek(max(0, size - tail))
                lines = parse_metrics(file.read())  # the first line may be cut, and is dropped
                last: dict[str, Any] = next((line for line in reversed(lines) if "loss" in line), {})
                if last or tail >= size:
                    return last
                tail *= 8
    except OSError:
        return {}


def metrics_of(run: Run) -> list[dict[str, Any]]:
    """Return the verified lines of a run; for a run that is being trained, all complete lines so far."""
    record = run.info.get("metrics")
    if record is None or run.status == "running" or not run.metrics.is_file():
        return read_metrics(run.metrics)
    content = read_bytes(run.metrics)
    verify_metrics(run.metrics, content, record)
    if run.is_finished and len(content) != record["bytes"]:
        raise DataError(f"{run.metrics} is damaged: it is longer than what was written; {_REMEDY}")
    # Beyond the record of an unfinished run are steps that were not saved, which a resume does again.
    return parse_metrics(content[: int(record["bytes"])])


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics; None for a line that was written or read only in part."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
