"""Runs the cells of a sweep as child processes, several at a time, each on its share of the machine.

Safe to kill at any moment: all state is in the run directories. A signal is passed on to the cells, which save; if the
sweep itself is killed with SIGKILL, the system sends SIGTERM to the cells, and their locks keep a second sweep from
starting a cell that is still saving.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from lapcli.runtime.errors import ExitCode, Interrupted, UsageError
from lapcli.runtime.machine import usable_cores
from lapcli.runtime.signals import StopRequest, end_with_parent, stop_on_signal
from lapcli.sweep.grid import Cell, Grid
from lapcli.sweep.state import commands_left, lock_cell, log_of, mark_as_search, progress, record_command
from lapcli.sweep.sweep import SearchWinner, Sweep, choose, is_tried

_POLL = 0.2  # seconds


class Process(Protocol):
    """A child with a process group of its own, as `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def wait(self) -> int: ...


@dataclass(frozen=True)
class Slot:
    """A share of the machine for one cell at a time; `environment` is added to ours for its processes."""

    environment: dict[str, str]


@dataclass
class CellStatus:
    """A cell and its progress."""

    cell: Cell
    state: str = "waiting"  # running, elsewhere, finished, diverged, failed, interrupted
    doing: str = ""  # train, or the command of `then`
    reason: str = ""
    started: float | None = None
    seconds: float = 0.0

    @property
    def is_settled(self) -> bool:
        return self.state in {"finished", "diverged", "failed", "interrupted"}


@dataclass
class _Job:
    status: CellStatus
    slot: Slot
    lock: IO[str]
    commands: deque[tuple[str, list[str]]]  # name and arguments of each
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0


@dataclass
class Outcome:
    statuses: list[CellStatus]
    choices: list[SearchWinner] = field(default_factory=list)
    undecided: list[Grid] = field(default_factory=list)

    @property
    def failed(self) -> list[CellStatus]:
        return [status for status in self.statuses if status.state == "failed"]

    @property
    def interrupted(self) -> list[CellStatus]:
        return [status for status in self.statuses if status.state == "interrupted"]

    def notes(self) -> list[str]:
        """Explain why cells of a grid are missing from the table."""
        return [f"the grid of {grid.prefix} waits for the rest of its search" for grid in self.undecided]


Show = Callable[[Sequence[CellStatus]], None]
Tell = Callable[[str], None]


class Runner:
    """Runs the cells. `show` gets all statuses at every poll, `tell` a sentence when something happens."""

    def __init__(
        self,
        sweep: Sweep,
        runs_dir: Path,
        slots: Sequence[Slot],
        *,
        only: str | None = None,
        nproc: str = "auto",
        track: Sequence[str] = (),
        show: Show,
        tell: Tell,
    ) -> None:
        self.sweep, self.runs_dir, self.only, self.nproc = sweep, runs_dir, only, nproc
        self.track = [word for tracker in track for word in ("--track", tracker)]
        self.show, self.tell = show, tell
        self.free = deque(slots)
        self.jobs: list[_Job] = []
        self.statuses: list[CellStatus] = []
        self.searching: list[tuple[Grid, list[Cell]]] = []
        self.choices: list[SearchWinner] = []
        for grid in sweep.grids:
            if cells := grid.search_cells():
                self.searching.append((grid, cells))
                self._add(cells)
            else:
                self._add(grid.cells())
        self._decide()

    def run(self) -> Outcome:
        """Run until every cell is settled; raise Interrupted after a signal, when the cells have saved."""
        if not self.statuses:  # the command has already refused a name that no cell has
            raise UsageError(
                f"the cells called {self.only} wait for their search; run it without --only first, or use --no-search"
            )
        with stop_on_signal(lambda name: self.tell(f"{name}: the running cells finish their step and save")) as stop:
            try:
                self._work(stop)
            except KeyboardInterrupt:  # the second Ctrl-C or SIGTERM
                self._kill()
                raise
            except BaseException:
                self._ask_to_stop()
                raise
        if stop:
            stopped = sum(status.state == "interrupted" for status in self.statuses)
            cells = f"{stopped} running cell{'s' if stopped != 1 else ''} saved and stopped"
            raise Interrupted(f"stopped by {stop.name}; {cells}. Run the same command to resume.")
        return Outcome(self.statuses, self.choices, [grid for grid, _ in self.searching])

    def _work(self, stop: StopRequest) -> None:
        passed_on = False
        while True:
            for job in list(self.jobs):
                self._look_at(job, bool(stop))
            if stop and not passed_on:
                # Once: a second SIGTERM would end the cells at once, without a save.
                passed_on = True
                self._ask_to_stop(wait=False)
            if not stop:
                self._start_some()
            self.show(self.statuses)
            if not self.jobs and (stop or all(status.is_settled for status in self.statuses)):
                return
            time.sleep(_POLL)

    def _add(self, cells: Sequence[Cell]) -> None:
        known = {status.cell.name for status in self.statuses}
        wanted = [cell for cell in cells if self.only is None or fnmatchcase(cell.name, self.only)]
        for cell in wanted:
            # Two grids may share a cell; cells of one name with different recipes were refused by `Sweep.check`.
            if cell.name not in known:
                self.statuses.append(status := CellStatus(cell))
                self._settle_if_done(status)

    def _settle_if_done(self, status: CellStatus) -> bool:
        if self._commands(status.cell):
            return False
        # Only a diverged run of a search has no command left without being trained.
        status.state = "finished" if progress(status.cell, self.runs_dir).is_trained else "diverged"
        if status.cell.is_search:
            mark_as_search(self.runs_dir / status.cell.name)
        return True

    def _decide(self) -> None:
        """Add the cells of grids whose search is finished."""
        for grid, cells in list(self.searching):
            assert grid.search is not None
            # None also if a run of the search failed: the grid waits until the same command has tried it again.
            choice = choose(cells, grid.search, self.runs_dir)
            if choice is not None:
                self.searching.remove((grid, cells))
                self.choices.append(choice)
                self.tell(f"chosen for {grid.prefix}: {choice}")
                self._add(grid.cells(choice.values))

    def _start_some(self) -> None:
        # A copy: `_decide` adds the cells of a grid whose search has just ended.
        for status in list(self.statuses):
            if status.state not in {"waiting", "elsewhere"} or not self.free:
                continue
            lock = lock_cell(status.cell, self.runs_dir)
            if lock is None:
                if status.state == "waiting":
                    self.tell(f"{status.cell.name} is being trained by another process; waiting for it")
                status.state = "elsewhere"
                continue
            if self._settle_if_done(status):  # finished by the process that held the lock before
                lock.close()
                self._decide()
                continue
            job = _Job(status, self.free.popleft(), lock, self._commands(status.cell))
            self.jobs.append(job)
            status.state, status.started = "running", time.monotonic()
            self._next_command(job)

    def _commands(self, cell: Cell) -> deque[tuple[str, list[str]]]:
        """Return the commands that are left for a cell."""
        commands: deque[tuple[str, list[str]]] = deque()
        if cell.is_search and is_tried(cell, self.runs_dir):
            return commands
        if not progress(cell, self.runs_dir).is_trained:
            commands.append(("train", [*cell.arguments(self.runs_dir), "--nproc", self.nproc, *self.track]))
        for text in commands_left(cell, self.runs_dir):
            commands.append((text, [*shlex.split(text), "--runs-dir", str(self.runs_dir)]))
        return commands

    def _next_command(self, job: _Job) -> None:
        what, arguments = job.commands[0]
        status = job.status
        status.doing = what
        self.tell(f"{status.cell.name}: {what if what != 'train' else 'training'}")
        with log_of(status.cell, self.runs_dir).open("ab") as log:
            job.log_start = log.tell()
            job.process = start_process(arguments, log, job.lock, job.slot.environment)

    def _look_at(self, job: _Job, stopping: bool) -> None:
        assert job.process is not None
        code = job.process.poll()
        if code is None:
            return
        status = job.status
        what, _ = job.commands.popleft()
        if code == ExitCode.DONE:
            if what != "train":
                record_command(status.cell, self.runs_dir, what)
            if job.commands and not stopping:
                self._next_command(job)
                return
            self._settle(job, "interrupted" if job.commands else "finished")
        elif code == ExitCode.INTERRUPTED or (stopping and code == -signal.SIGTERM):  # the latter: no handler yet
            self._settle(job, "interrupted")
        elif status.cell.is_search and progress(status.cell, self.runs_dir).diverged:
            self._settle(job, "diverged", reason_in(log_of(status.cell, self.runs_dir), job.log_start, code))
        else:
            self._settle(job, "failed", reason_in(log_of(status.cell, self.runs_dir), job.log_start, code))

    def _settle(self, job: _Job, state: str, reason: str = "") -> None:
        status = job.status
        status.state, status.reason, status.doing = state, reason, ""
        status.seconds = time.monotonic() - (status.started or time.monotonic())
        # The child has ended, so this is the last open handle, and the kernel frees the lock.
        job.lock.close()
        self.jobs.remove(job)
        self.free.append(job.slot)
        first = reason.splitlines()[0] if reason else ""
        self.tell(f"{status.cell.name}: {state}" + (f": {first}" if first else f" after {status.seconds:.0f} s"))
        if status.cell.is_search:
            mark_as_search(self.runs_dir / status.cell.name)
            self._decide()

    def _ask_to_stop(self, wait: bool = True) -> None:
        """Send SIGTERM to each cell's main process alone: it stops its own ranks, and its data workers must survive
        until the step ends."""
        for job in self.jobs:
            if job.process is not None:
                job.process.send_signal(signal.SIGTERM)
        for job in self.jobs if wait else []:
            if job.process is not None:
                job.process.wait()

    def _kill(self) -> None:
        """Kill the cells at once; their earlier checkpoints remain."""
        for job in self.jobs:
            if job.process is not None:
                kill_process(job.process)


def start_process(
    arguments: Sequence[str], log: IO[bytes], lock: IO[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `lap ARGUMENTS`; the child inherits the lock, so that it is held for as long as the child lives."""
    return subprocess.Popen(
        [sys.executable, "-m", "lapcli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Without colours, because `reason_in` looks for lines that begin with "lap: ".
        env={**os.environ, "NO_COLOR": "1", **environment},
        pass_fds=(lock.fileno(),),
        # A process group of its own: Ctrl-C reaches a cell only through the sweep, and so only once.
        process_group=0,
        # If the sweep dies, the system sends SIGTERM to the cell, which saves.
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )


def kill_process(process: Process) -> None:
    """Kill a process and its children at once."""
    if process.poll() is None:
        # `start_process` makes the child lead a group, so that its id is also the group's.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reason_in(log: Path, start: int, code: int) -> str:
    """Return why a command failed: its own message, else the signal that ended it, else its last line of output."""
    with log.open("rb") as file:
        # The log is appended to: what is before `start` belongs to earlier commands and attempts.
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    messages = [number for number, line in enumerate(lines) if line.startswith("lap: ")]
    if messages:
        return "\n".join([lines[messages[-1]].removeprefix("lap: "), *lines[messages[-1] + 1 :]][:10])
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; see {log}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"{last[:300]}; see {log}"


def share_machine(jobs: int) -> tuple[list[Slot], str]:
    """Return slots of equal size, and a description; one job has the whole machine and needs no environment."""
    if jobs == 1:
        return [Slot({})], "one cell at a time, with the whole machine"
    share = str(max(1, usable_cores() // jobs))
    threads = {"LAP_CORES": share}  # for all processes of a cell, its data workers included
    if "OMP_NUM_THREADS" not in os.environ:
        threads["OMP_NUM_THREADS"] = share
    gpus = visible_gpus()
    if not gpus:
        count = threads.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
        return [Slot(dict(threads)) for _ in range(jobs)], f"{jobs} cells at a time, {count} CPU threads each"
    each = len(gpus) // jobs
    if each == 0:  # fewer GPUs than jobs, for small models: several cells share a GPU
        parts = [[gpus[number % len(gpus)]] for number in range(jobs)]
        words = f"{jobs} cells at a time, sharing {len(gpus)} GPUs"
    else:  # equal shares, so that a cell that is resumed in another slot has as many GPUs as before
        parts = [gpus[number * each : (number + 1) * each] for number in range(jobs)]
        idle = len(gpus) - each * jobs
        words = f"{jobs} cells at a time, {each} GPU{'s' if each > 1 else ''} each" + (f", {idle} idle" if idle else "")
    return [Slot({**threads, "CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts], words


def visible_gpus() -> list[str]:
    """Return the numbers or name of the GPUs, in the form of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
