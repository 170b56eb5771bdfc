"""Runs cells as child processes, several at a time, each on its part of the machine.

A chooser supplies the cells: a complete grid, or the proposals of a search. Safe to kill at any moment: a
signal is passed on to the cells, which save; if the runner itself is killed with SIGKILL, the system sends SIGTERM to
the cells, and their locks keep a second runner from starting a cell that is still saving.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from lapcli.experiments.cells import Cell, commands_left, last_scores, lock_cell, log_of, progress, record
from lapcli.experiments.overview import Overview
from lapcli.recipe.chat import STAGES
from lapcli.runs import INFO
from lapcli.runtime.environment import usable_cores
from lapcli.runtime.errors import ExitCode, Interrupted, LapError
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.signals import StopRequest, end_with_parent, stop_on_signal
from lapcli.runtime.tables import fitted

_POLL = 0.2  # seconds
Environment = dict[str, str]  # added to ours for the processes of a cell


class Process(Protocol):
    """A child process with its own process group, like `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def wait(self) -> int: ...


class Chooser:
    """Chooses the cells to run, here from a given list."""

    def __init__(self, cells: Sequence[Cell], runs_dir: Path) -> None:
        self.runs_dir, self._new = runs_dir, list(cells)

    def next(self) -> list[Cell]:
        """Return cells to add to the queue; called while a part of the machine is free."""
        new, self._new = self._new, []
        return new

    def state(self, cell: Cell) -> str | None:
        """Return the final state of a cell that no longer needs a process."""
        training = progress(cell, self.runs_dir)
        if cell.is_search and training.diverged:
            return "diverged"
        return "finished" if training.is_trained and not commands_left(cell, self.runs_dir) else None

    def settled(self, cell: Cell, state: str) -> str:
        """Process a cell that has ended; return a remark for the user."""
        return ""

    def cost(self, cell: Cell) -> float:
        """Return a cell's relative cost, to estimate the time left."""
        return 1.0

    def later(self) -> list[float]:
        """Return the costs of the cells that are chosen after others have ended."""
        return []


@dataclass
class CellStatus:
    cell: Cell
    state: str = "waiting"  # running, elsewhere, finished, diverged, failed, interrupted
    reason: str = ""

    @property
    def is_settled(self) -> bool:
        return self.state not in ("waiting", "running", "elsewhere")


@dataclass
class _Job:
    status: CellStatus
    environment: Environment
    lock: IO[str]
    commands: deque[tuple[str, list[str]]]  # `train` or the text of `then`, and its words
    started: float
    process: Any = None
    log_start: int = 0
    first_step: int = 0  # that this process takes


def start_process(words: Sequence[str], log: IO[bytes], lock: IO[str], environment: Mapping[str, str]) -> Process:
    """Start `lap WORDS`; the child inherits the lock and so holds it as long as it lives."""
    return subprocess.Popen(
        [sys.executable, "-m", "lapcli", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Without colours, because `_reason` looks for lines that begin with "lap: ".
        env={**os.environ, "NO_COLOR": "1", **environment},
        pass_fds=(lock.fileno(),),
        # A separate process group: Ctrl-C reaches a cell only through the runner, and so only once.
        process_group=0,
        # If the runner dies, the system sends SIGTERM to the cell, which saves.
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )


class Runner:
    """Runs the cells of a chooser. `tell` receives a sentence about each event; `console` shows the progress."""

    def __init__(
        self,
        chooser: Chooser,
        runs_dir: Path,
        slots: Sequence[Environment] = ({},),
        *,
        nproc: str = "auto",
        tell: Callable[[str], None],
        start: Callable[..., Process] = start_process,
        console: LogConsole | None = None,
    ) -> None:
        self.chooser, self.runs_dir, self.tell, self.start = chooser, runs_dir, tell, start
        self.options = ["--nproc", nproc]
        self.free, self.slots = deque(slots), len(slots)
        self.seconds_of_cost: list[float] = []  # of the cells that were trained from their first step on
        self.overview = Overview(self, console) if console else None
        self.jobs: list[_Job] = []
        self.statuses: list[CellStatus] = []

    def run(self) -> list[CellStatus]:
        """Run until every cell is settled; raise Interrupted after a signal, when the cells have saved."""
        with (
            stop_on_signal(lambda name: self.tell(f"{name}: the running cells finish their step and save")) as stop,
            self.overview or nullcontext(),
        ):
            try:
                self._work(stop)
            except KeyboardInterrupt:  # the second Ctrl-C
                for job in self.jobs:
                    if job.process.poll() is None:
                        os.killpg(job.process.pid, signal.SIGKILL)  # with its children; checkpoints remain
                        job.process.wait()
                raise
            except BaseException:  # a damaged file, say: the cells save instead of training on alone
                self._ask_to_stop()
                for job in self.jobs:
                    job.process.wait()
                raise
        if stop:
            stopped = sum(status.state == "interrupted" for status in self.statuses)
            cells = f"{stopped} running cell{'s' if stopped != 1 else ''} saved and stopped"
            raise Interrupted(f"stopped by {stop.name}; {cells}. Run the same command to resume.")
        return self.statuses

    def _work(self, stop: StopRequest) -> None:
        passed_on = False
        while True:
            for job in list(self.jobs):
                self._look_at(job, bool(stop))
            if stop and not passed_on:
                # Only once: a second SIGTERM would end the cells without a save.
                passed_on = True
                self._ask_to_stop()
            if not stop:
                self._start_some()
            if not self.jobs and (stop or all(status.is_settled for status in self.statuses)):
                return
            if self.overview:
                self.overview.show()
            time.sleep(_POLL)

    def _start_some(self) -> None:
        for status in self.statuses:
            if self.free and not status.is_settled and status.state != "running":
                self._start(status)
        while self.free and (cells := self.chooser.next()):
            known = {status.cell.name for status in self.statuses}
            new = [CellStatus(cell) for cell in {cell.name: cell for cell in cells}.values() if cell.name not in known]
            self.statuses += new
            for status in new:
                if self.free:
                    self._start(status)

    def _start(self, status: CellStatus) -> None:
        cell = status.cell
        lock = lock_cell(cell.name, self.runs_dir)
        if lock is None:
            if status.state == "waiting":
                self.tell(f"{cell.name} is being trained by another process; waiting for it")
            status.state = "elsewhere"
        elif state := self.chooser.state(cell):  # settled by the process that held the lock before
            self._settle(status, state)
            lock.close()
        else:
            status.state = "running"
            job = _Job(status, self.free.popleft(), lock, self._commands(cell), time.monotonic())
            job.first_step = progress(cell, self.runs_dir).step
            self._next_command(job)
            self.jobs.append(job)

    def _commands(self, cell: Cell) -> deque[tuple[str, list[str]]]:
        """Return a cell's remaining commands."""
        commands: deque[tuple[str, list[str]]] = deque()
        where = ["--runs-dir", str(self.runs_dir)]
        if not progress(cell, self.runs_dir).is_trained:
            sets = [word for text in cell.overrides for word in ("--set", text)]
            commands.append(("train", ["train", str(cell.recipe), *sets, "--name", cell.name, *where, *self.options]))
        commands.extend((text, [*shlex.split(text), *where]) for text in commands_left(cell, self.runs_dir))
        return commands

    def _next_command(self, job: _Job) -> None:
        what, words = job.commands[0]
        self.tell(f"{job.status.cell.name}: {what if what != 'train' else 'training'}")
        with log_of(job.status.cell.name, self.runs_dir).open("ab") as log:
            job.log_start = log.tell()
            job.process = self.start(words, log, job.lock, job.environment)

    def _look_at(self, job: _Job, stopping: bool) -> None:
        cell, code = job.status.cell, job.process.poll()
        if code is None:
            return
        what, _ = job.commands.popleft()
        if code == ExitCode.DONE and what != "train":
            record(self.runs_dir / cell.name, **{what: progress(cell, self.runs_dir).weights_sha256})
        if code == ExitCode.DONE and job.commands and not stopping:
            self._next_command(job)
            return
        self.jobs.remove(job)
        self.free.append(job.environment)
        if code == ExitCode.DONE:
            state = "interrupted" if job.commands else "finished"
            if job.first_step == 0:
                self.seconds_of_cost.append((time.monotonic() - job.started) / self.chooser.cost(cell))
        elif code == ExitCode.INTERRUPTED or (stopping and code == -signal.SIGTERM):  # the latter: no handler yet
            state = "interrupted"
        else:
            state = "diverged" if self.chooser.state(cell) == "diverged" else "failed"
            job.status.reason = _reason(log_of(cell.name, self.runs_dir), job.log_start, code)
        self._settle(job.status, state, f" after {time.monotonic() - job.started:.0f} s")
        # The child has ended, so this is the last open handle, and the kernel frees the lock; after the chooser knows.
        job.lock.close()

    def _settle(self, status: CellStatus, state: str, seconds: str = "") -> None:
        status.state = state
        if status.cell.is_search:
            record(self.runs_dir / status.cell.name, search=True)
        remark = self.chooser.settled(status.cell, state) or (status.reason.splitlines() or [""])[0]
        if seconds:
            self.tell(f"{status.cell.name}: {state}{f': {remark}' if remark else seconds}")

    def _ask_to_stop(self) -> None:
        """Send SIGTERM only to each cell's main process: it stops its own ranks, and its data workers must survive
        until the step ends."""
        for job in self.jobs:
            job.process.send_signal(signal.SIGTERM)


def _reason(log: Path, start: int, code: int) -> str:
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


def as_data(statuses: Sequence[CellStatus], runs_dir: Path) -> list[dict[str, Any]]:
    scores = last_scores([status.cell.name for status in statuses if status.state == "finished"], runs_dir)
    data = []
    for status in statuses:
        cell, training = status.cell, progress(status.cell, runs_dir)
        validation = {metric: value for metric, (value, _) in scores.get(cell.name, {}).items()}
        facts = {"cell": cell.name, "run": str(runs_dir / cell.name), "values": dict(cell.values)}
        ended = {"state": status.state, "step": training.step, "steps": training.steps, "validation": validation}
        data.append({**facts, **ended, "reason": status.reason or None})
    return data


def final_table(statuses: Sequence[CellStatus], runs_dir: Path) -> str:
    """List every cell with its result, followed by the complete reason for each failure."""
    rows, below = [("cell", "state", "step", "result")], []
    for cell in as_data(statuses, runs_dir):
        numbers = "  ".join(
            f"{key.removeprefix('validation_')} {value:.4f}" for key, value in cell["validation"].items()
        )
        step = "" if cell["steps"] is None else f"{cell['step']:,}/{cell['steps']:,}"
        reason = (cell["reason"] or "").splitlines()
        rows.append((cell["cell"], cell["state"], step, reason[0] if reason else numbers))
        if cell["state"] == "failed":
            below += ["", f"{cell['cell']} failed:", *(f"  {line}" for line in reason)]
    return "\n".join([*fitted(rows), *below])


def report_names(statuses: Sequence[CellStatus], runs_dir: Path) -> list[str]:
    """Return the runs of a report on cells: their own, and those of the chat stages that followed."""
    cells = [status.cell.name for status in statuses if not status.cell.is_search]
    names = [run for cell in cells for run in (cell, *(f"{cell}-{stage}" for stage in STAGES))]
    return [run for run in names if (runs_dir / run / INFO).exists()]


def failure(statuses: Sequence[CellStatus]) -> LapError | None:
    """Return the error that sets the exit code; None if no cell has failed or was interrupted."""
    states = [status.state for status in statuses]
    if failed := states.count("failed"):
        return LapError(f"{failed} of {len(states)} cells failed; run the same command to try them again")
    if count := states.count("interrupted"):
        return Interrupted(f"{count} of {len(states)} cells were interrupted; run the same command to resume them")
    return None


def share_machine(jobs: int) -> tuple[list[Environment], str]:
    """Return environments that divide the machine equally, and a description; a single job needs none."""
    if jobs == 1:
        return [{}], "one cell at a time, on the complete machine"
    share = str(max(1, usable_cores() // jobs))
    threads = {"LAP_CORES": share}  # for all processes of a cell, its data workers included
    if "OMP_NUM_THREADS" not in os.environ:
        threads["OMP_NUM_THREADS"] = share
    gpus = visible_gpus()
    if not gpus:
        count = threads.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
        return [dict(threads) for _ in range(jobs)], f"{jobs} cells at a time, {count} CPU threads each"
    each = len(gpus) // jobs
    if each == 0:  # fewer GPUs than jobs, for small models: several cells share a GPU
        parts = [[gpus[number % len(gpus)]] for number in range(jobs)]
        words = f"{jobs} cells at a time, sharing {len(gpus)} GPUs"
    else:  # equal shares, so that a cell that is resumed in another slot has as many GPUs as before
        parts = [gpus[number * each : (number + 1) * each] for number in range(jobs)]
        idle = len(gpus) - each * jobs
        words = f"{jobs} cells at a time, {each} GPU{'s' if each > 1 else ''} each" + (f", {idle} idle" if idle else "")
    return [{**threads, "CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts], words


def visible_gpus() -> list[str]:
    """Return the numbers or name of the GPUs, in the form of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
