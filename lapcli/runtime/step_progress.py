"""How far a run is: one bar on a terminal, a plain line every so often elsewhere, nothing on other ranks."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class StepProgress:
    """Shows step, loss, learning rate, throughput, share of the peak where it is known, and the time left."""

    def __init__(self, console: Console, first: int, steps: int, unit: str, shown: bool = True) -> None:
        self._console, self._first, self._steps, self._unit = console, first, steps, unit
        self._shown = shown
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._bar: Progress | None = None
        if shown and console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(
        self, step: int, loss: float, lr: float, units_per_second: float | None, share_of_peak: float | None
    ) -> None:
        """`step` updates are done. The first of a process has no throughput: it compiles and warms up."""
        if not self._shown:
            return
        text = f"loss {loss:.4f}  lr {lr:.3g}"
        if units_per_second is not None:
            text += f"  {units_per_second:,.0f} {self._unit}/s"
        if share_of_peak is not None:
            text += f"  {share_of_peak:.0%} of peak"
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
            return
        now = time.monotonic()
        if step in (self._first + 1, self._steps) or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (now - self._started) / max(step - self._first, 1) * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {text}  {duration(left)} left", highlight=False)

    def note(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._shown:
            self._console.print(text, highlight=False, markup=False)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
