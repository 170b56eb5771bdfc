"""The cells of a sweep as people see them: a live table on a terminal, lines elsewhere, and the table at the end."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lapcli.runtime.progress import duration
from lapcli.sweep.runner import Track
from lapcli.sweep.state import last_validation, progress

_SECONDS = 1.0  # between two looks at the files of running cells
_SHOWN_FIRST = ("running", "failed", "interrupted", "elsewhere", "waiting", "diverged", "finished")
_COLOURS = {"running": "cyan", "failed": "red", "interrupted": "yellow", "diverged": "yellow", "finished": "green"}


class LiveTable:
    """All cells where they fit the screen; else those that run or failed first, and the numbers of the rest."""

    def __init__(self, console: Console, runs_dir: Path) -> None:
        self._console, self._runs_dir = console, runs_dir
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._last = float("-inf")

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def tell(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, tracks: Sequence[Track]) -> None:
        now = time.monotonic()
        if self._live is None or now - self._last < _SECONDS:
            return
        self._last = now
        self._live.update(self._table(tracks, now), refresh=True)

    def _table(self, tracks: Sequence[Track], now: float) -> Table:
        room = max(5, self._console.height - 5)
        shown = set(sorted(range(len(tracks)), key=lambda n: (_SHOWN_FIRST.index(tracks[n].state), n))[:room])
        counts = Counter(track.state for track in tracks)
        table = Table(caption=", ".join(f"{count} {state}" for state, count in counts.items()), caption_justify="left")
        for name in ("cell", "state", "step", "result", "time"):
            table.add_column(name, no_wrap=name != "result")
        for number, track in enumerate(tracks):
            if number in shown:
                seconds = now - track.started if track.state == "running" and track.started else track.seconds
                step, found = numbers(track, self._runs_dir)
                state = Text(track.doing.split()[0] if track.doing else track.state, _COLOURS.get(track.state, ""))
                table.add_row(Text(track.cell.name), state, step, Text(found), duration(seconds) if seconds else "")
        return table


def numbers(track: Track, runs_dir: Path) -> tuple[str, str]:
    """How far the cell is, and its result, its loss or why it failed."""
    if track.state == "waiting":
        return "", ""
    found = progress(track.cell, runs_dir)
    step = "" if found.steps is None else f"{found.step:,}/{found.steps:,}"
    if track.reason:
        return step, track.reason.splitlines()[0]
    if found.is_trained:
        return step, result(last_validation(track.cell, runs_dir))
    return step, "" if found.loss is None else f"loss {found.loss:.4f}"


def result(validation: dict[str, float]) -> str:
    values = [f"{name.removeprefix('validation_')} {value:.4f}" for name, value in validation.items()]
    return "  ".join(values)


def final_table(tracks: Sequence[Track], runs_dir: Path) -> str:
    """Every cell with its result; the whole reason of each that failed below."""
    rows = [("cell", "state", "step", "result")]
    rows += [(track.cell.name, track.state, *numbers(track, runs_dir)) for track in tracks]
    lines = aligned(rows)
    for track in tracks:
        if track.state == "failed":
            lines += ["", f"{track.cell.name} failed:", *(f"  {line}" for line in track.reason.splitlines())]
    return "\n".join(lines)


def as_data(tracks: Sequence[Track], runs_dir: Path) -> list[dict[str, Any]]:
    return [
        {
            "cell": track.cell.name,
            "run": str(runs_dir / track.cell.name),
            "values": dict(track.cell.values),
            "state": track.state,
            "step": progress(track.cell, runs_dir).step,
            "validation": last_validation(track.cell, runs_dir),
            "reason": track.reason or None,
        }
        for track in tracks
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
