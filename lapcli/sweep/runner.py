"""Runs the cells of a sweep as child processes, some at a time, and says what became of each.

Safe to kill at any moment: all state is in the run directories. A signal is passed on to the cells, which save; if the
sweep itself is killed outright, the system tells the cells to stop, and their locks keep a second sweep from starting
a cell that is still saving.
"""

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from lapcli.runtime.errors import ExitCode, Interrupted, UsageError
from lapcli.runtime.signals import StopRequest, stop_on_signal
from lapcli.sweep import children
from lapcli.sweep import then as follow
from lapcli.sweep.cells import Cell, Grid, Sweep
from lapcli.sweep.search import Choice, choose, is_tried
from lapcli.sweep.slots import Slot
from lapcli.sweep.state import commands_left, log_of, note_done, note_search, progress, take

_POLL = 0.2  # seconds


@dataclass
class Track:
    """A cell and what is known of it."""

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
    track: Track
    slot: Slot
    lock: IO[str]
    commands: deque[tuple[str, list[str]]]  # what it is called, and its arguments
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0


@dataclass
class Outcome:
    tracks: list[Track]
    choices: list[Choice] = field(default_factory=list)
    undecided: list[Grid] = field(default_factory=list)

    @property
    def failed(self) -> list[Track]:
        return [track for track in self.tracks if track.state == "failed"]

    @property
    def interrupted(self) -> list[Track]:
        return [track for track in self.tracks if track.state == "interrupted"]

    def notes(self) -> list[str]:
        """What a reader of the table would wonder about."""
        return [f"the grid of {grid.prefix} waits for the rest of its search" for grid in self.undecided]


Show = Callable[[Sequence[Track]], None]
Tell = Callable[[str], None]


class Runner:
    """`show` gets all tracks at every look, `tell` a sentence when something happens."""

    def __init__(
        self,
        sweep: Sweep,
        runs_dir: Path,
        slots: Sequence[Slot],
        *,
        only: str | None = None,
        nproc: str = "auto",
        show: Show,
        tell: Tell,
    ) -> None:
        self.sweep, self.runs_dir, self.only, self.nproc = sweep, runs_dir, only, nproc
        self.show, self.tell = show, tell
        self.free = deque(slots)
        self.jobs: list[_Job] = []
        self.tracks: list[Track] = []
        self.searching: list[tuple[Grid, list[Cell]]] = []
        self.choices: list[Choice] = []
        for grid in sweep.grids:
            if cells := grid.search_cells():
                self.searching.append((grid, cells))
                self._add(cells)
            else:
                self._add(grid.cells())
        self._decide()

    def run(self) -> Outcome:
        """Until every cell is settled; raises Interrupted if a signal came first, after the cells have saved."""
        if not self.tracks:  # cells of that name are known, else the command would have said so
            raise UsageError(
                f"the cells called {self.only} wait for their search; run it first, without --only, or use --no-search"
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
            stopped = sum(track.state == "interrupted" for track in self.tracks)
            cells = f"{stopped} running cell{'s' if stopped != 1 else ''} stopped and saved what there was"
            raise Interrupted(f"stopped by {stop.name}; {cells}. Run the same command to go on.")
        return Outcome(self.tracks, self.choices, [grid for grid, _ in self.searching])

    def _work(self, stop: StopRequest) -> None:
        passed_on = False
        while True:
            for job in list(self.jobs):
                self._look_at(job, bool(stop))
            if stop and not passed_on:
                passed_on = True
                self._ask_to_stop(wait=False)
            if not stop:
                self._start_some()
            self.show(self.tracks)
            if not self.jobs and (stop or all(track.is_settled for track in self.tracks)):
                return
            time.sleep(_POLL)

    def _add(self, cells: Sequence[Cell]) -> None:
        known = {track.cell.name for track in self.tracks}
        wanted = [cell for cell in cells if self.only is None or fnmatchcase(cell.name, self.only)]
        for cell in wanted:
            if cell.name not in known:
                self.tracks.append(track := Track(cell))
                self._settle_if_done(track)

    def _settle_if_done(self, track: Track) -> bool:
        if self._commands(track.cell):
            return False
        track.state = "finished" if progress(track.cell, self.runs_dir).is_trained else "diverged"
        if track.cell.is_search:
            note_search(track.cell, self.runs_dir)
        return True

    def _decide(self) -> None:
        """Opens the grids whose search is through."""
        for grid, cells in list(self.searching):
            assert grid.search is not None
            choice = choose(cells, grid.search, self.runs_dir)
            if choice is not None:
                self.searching.remove((grid, cells))
                self.choices.append(choice)
                self.tell(f"chosen for {grid.prefix}: {choice}")
                self._add(grid.cells(choice.values))

    def _start_some(self) -> None:
        for track in list(self.tracks):
            if track.state not in {"waiting", "elsewhere"} or not self.free:
                continue
            lock = take(track.cell, self.runs_dir)
            if lock is None:
                if track.state == "waiting":
                    self.tell(f"{track.cell.name} is being worked on by another process; waiting for it")
                track.state = "elsewhere"
                continue
            if self._settle_if_done(track):  # by the one who had it
                lock.close()
                self._decide()
                continue
            job = _Job(track, self.free.popleft(), lock, self._commands(track.cell))
            self.jobs.append(job)
            track.state, track.started = "running", time.monotonic()
            self._next_command(job)

    def _commands(self, cell: Cell) -> deque[tuple[str, list[str]]]:
        """What is left to do for a cell."""
        commands: deque[tuple[str, list[str]]] = deque()
        if cell.is_search and is_tried(cell, self.runs_dir):
            return commands
        if not progress(cell, self.runs_dir).is_trained:
            commands.append(("train", [*cell.arguments(self.runs_dir), "--nproc", self.nproc]))
        for text in commands_left(cell, self.runs_dir):
            commands.append((text, follow.arguments(text, self.runs_dir)))
        return commands

    def _next_command(self, job: _Job) -> None:
        what, arguments = job.commands[0]
        track = job.track
        track.doing = what
        self.tell(f"{track.cell.name}: {what if what != 'train' else 'training'}")
        with log_of(track.cell, self.runs_dir).open("ab") as log:
            job.log_start = log.tell()
            job.process = children.start(arguments, log, job.lock, job.slot.environment)

    def _look_at(self, job: _Job, stopping: bool) -> None:
        assert job.process is not None
        code = job.process.poll()
        if code is None:
            return
        track = job.track
        what, _ = job.commands.popleft()
        if code == ExitCode.DONE:
            if what != "train":
                note_done(track.cell, self.runs_dir, what)
            if job.commands and not stopping:
                self._next_command(job)
                return
            self._settle(job, "interrupted" if job.commands else "finished")
        elif code == ExitCode.INTERRUPTED or (stopping and code == -signal.SIGTERM):
            self._settle(job, "interrupted")
        elif track.cell.is_search and progress(track.cell, self.runs_dir).diverged:
            self._settle(job, "diverged", children.reason_in(log_of(track.cell, self.runs_dir), job.log_start, code))
        else:
            self._settle(job, "failed", children.reason_in(log_of(track.cell, self.runs_dir), job.log_start, code))

    def _settle(self, job: _Job, state: str, reason: str = "") -> None:
        track = job.track
        track.state, track.reason, track.doing = state, reason, ""
        track.seconds = time.monotonic() - (track.started or time.monotonic())
        job.lock.close()
        self.jobs.remove(job)
        self.free.append(job.slot)
        first = reason.splitlines()[0] if reason else ""
        self.tell(f"{track.cell.name}: {state}" + (f": {first}" if first else f" after {track.seconds:.0f} s"))
        if track.cell.is_search:
            note_search(track.cell, self.runs_dir)
            self._decide()

    def _ask_to_stop(self, wait: bool = True) -> None:
        """Only the cell itself: it tells its own processes, and those that read its data must outlive the step."""
        for job in self.jobs:
            if job.process is not None:
                job.process.send_signal(signal.SIGTERM)
        for job in self.jobs if wait else []:
            if job.process is not None:
                job.process.wait()

    def _kill(self) -> None:
        """At once; what the cells saved before is kept."""
        for job in self.jobs:
            if job.process is not None:
                children.kill(job.process)
