"""The output of a sweep: a live table on a terminal, lines elsewhere, the final table, and its reports."""

import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lapcli.recipe.chat import STAGES
from lapcli.runtime.errors import Interrupted, LapError
from lapcli.runtime.progress import duration
from lapcli.runtime.tables import fitted
from lapcli.sweep.runner import CellStatus, Outcome
from lapcli.sweep.state import last_validation, progress
from lapcli.sweep.sweep import Sweep

_SECONDS = 1.0  # between two reads of the files of running cells
_SHOWN_FIRST = ("running", "failed", "interrupted", "elsewhere", "waiting", "diverged", "finished")
_COLOURS = {"running": "cyan", "failed": "red", "interrupted": "yellow", "diverged": "yellow", "finished": "green"}


class LiveTable:
    """A table of all cells if they fit the screen; else of running and failed ones first, and counts of each state."""

    def __init__(self, console: Console, runs_dir: Path) -> None:
        self._console, self._runs_dir = console, runs_dir
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._last = float("-inf")

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def tell(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, statuses: Sequence[CellStatus]) -> None:
        now = time.monotonic()
        if self._live is None or now - self._last < _SECONDS:
            return
        self._last = now
        self._live.update(self._table(statuses, now), refresh=True)

    def _table(self, statuses: Sequence[CellStatus], now: float) -> Text:
        order = sorted(range(len(statuses)), key=lambda n: (_SHOWN_FIRST.index(statuses[n].state), n))
        counts = Counter(status.state for status in statuses)
        room = max(5, self._console.height - 3)
        lines: list[str] = []
        for most in range(min(room, len(statuses)), 0, -1):  # in a narrow window a cell takes several lines
            shown = sorted(order[:most])
            rows = [("cell", "state", "step", "result", "time"), *(self._row(statuses[n], now) for n in shown)]
            lines = fitted(rows, width=self._console.width - 1)
            if len(lines) <= room:
                break
        text = Text("\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())]))
        for state, colour in _COLOURS.items():
            # With the blanks of a column, so that a cell whose name contains such a word is not coloured.
            text.highlight_words([f" {state} ", f" {state}\n"], colour)
        return text

    def _row(self, status: CellStatus, now: float) -> tuple[str, ...]:
        seconds = now - status.started if status.state == "running" and status.started else status.seconds
        state = status.doing.split()[0] if status.doing else status.state
        return status.cell.name, state, *step_and_result(status, self._runs_dir), duration(seconds) if seconds else ""


def step_and_result(status: CellStatus, runs_dir: Path) -> tuple[str, str]:
    """Return the cell's step, and its validation, its loss or why it failed."""
    if status.state == "waiting":
        return "", ""
    training = progress(status.cell, runs_dir)
    step = "" if training.steps is None else f"{training.step:,}/{training.steps:,}"
    if status.reason:
        return step, status.reason.splitlines()[0]
    if training.is_trained:
        numbers = last_validation(status.cell, runs_dir)
        return step, "  ".join(f"{name.removeprefix('validation_')} {value:.4f}" for name, value in numbers.items())
    return step, "" if training.loss is None else f"loss {training.loss:.4f}"


def final_table(statuses: Sequence[CellStatus], runs_dir: Path) -> str:
    """List every cell with its result; below, the whole reason of each failure."""
    rows = [("cell", "state", "step", "result")]
    rows += [(status.cell.name, status.state, *step_and_result(status, runs_dir)) for status in statuses]
    lines = fitted(rows)
    for status in statuses:
        if status.state == "failed":
            lines += ["", f"{status.cell.name} failed:", *(f"  {line}" for line in status.reason.splitlines())]
    return "\n".join(lines)


def as_data(statuses: Sequence[CellStatus], runs_dir: Path) -> list[dict[str, Any]]:
    return [
        {
            "cell": status.cell.name,
            "run": str(runs_dir / status.cell.name),
            "values": dict(status.cell.values),
            "state": status.state,
            "step": progress(status.cell, runs_dir).step,
            "validation": last_validation(status.cell, runs_dir),
            "reason": status.reason or None,
        }
        for status in statuses
    ]


def make_reports(sweep: Sweep, statuses: Sequence[CellStatus], runs_dir: Path, to_stderr: bool) -> int:
    """Run `lap report` for each `report` of the sweep, on the cells' runs and their chat stages; return its exit
    code."""
    cells = [status.cell.name for status in statuses if not status.cell.is_search]
    names = [name for cell in cells for name in (cell, *(f"{cell}-{stage}" for stage in STAGES))]
    existing = [name for name in names if (runs_dir / name / "run.json").exists()]
    for text in sweep.reports if existing else ():
        words = ["report", *existing, *shlex.split(text), "--runs-dir", str(runs_dir)]
        # A process: the words are a command line, and the parser of commands is in a layer above this one.
        command = [sys.executable, "-m", "lapcli", *words]
        done = subprocess.run(command, stdout=sys.stderr if to_stderr else None, check=False)
        if done.returncode:
            return done.returncode
    return 0


def failure(outcome: Outcome) -> LapError | None:
    """Return the error that sets the exit code; None if every cell is finished."""
    if outcome.failed:
        count = len(outcome.failed)
        return LapError(f"{count} of {len(outcome.statuses)} cells failed; run the same command to try them again")
    if outcome.interrupted:
        count = len(outcome.interrupted)
        return Interrupted(
            f"{count} of {len(outcome.statuses)} cells were interrupted; run the same command to resume them"
        )
    return None
