"""Messages and progress on stderr, from rank 0 only: a bar on a terminal, periodic lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Self

from rich.console import Console
from rich.text import Text

from lapcli.runtime.environment import is_main_process, launcher


def say_start(text: str) -> None:
    """Print what a command does during its slow imports; with several ranks the launcher has printed it."""
    if is_main_process() and launcher() is None:
        print(f"{text} ...", file=sys.stderr, flush=True)


class LogConsole(Console):
    """A console on stderr that prints text unchanged: a `[` in a path is not markup.

    Its reader may exit, as in `lap train ... 2>&1 | head`, without ending the run.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(stderr=True, file=file, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def warn(self, text: str) -> None:
        self.print(Text.assemble(("warning: ", "yellow"), text))

    def on_broken_pipe(self) -> None:
        """Discard further output; rich would otherwise end the process in the middle of a step."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # The descriptor too, or the next print to stderr, by us or a library, would fail.
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


#: The callback of long work: its name, the amount done, and the total.
Progress = Callable[[str, int, int], None]
SECONDS_BETWEEN_LINES = 10.0
STEPS_BEFORE_ESTIMATE = 5  # the first are slower: they compile and warm up


@contextmanager
def shown_progress(is_shown: bool = True) -> Iterator[Progress]:
    """Yield a callback for work that reports its progress; it shows nothing unless `is_shown` (rank 0)."""
    from rich.progress import TimeRemainingColumn

    has_bars = is_shown and sys.stderr.isatty()
    tasks: dict[str, Any] = {}
    last = time.monotonic()
    with _bars("{task.description} {task.percentage:.0f}%", TimeRemainingColumn(), has_bars) as bars:

        def show(doing: str, done: int, total: int) -> None:
            nonlocal last
            if has_bars:
                if doing not in tasks:
                    tasks[doing] = bars.add_task(doing, total=total)
                bars.update(tasks[doing], completed=done, total=total)
            elif is_shown and time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                print(f"{doing}: {done / max(total, 1):.0%}", file=sys.stderr, flush=True)

        yield show


def _bars(before: str, after: Any, is_shown: bool, console: Console | None = None) -> Any:
    """Return rich's progress bar between two columns."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    return Bars(TextColumn(before), BarColumn(), after, console=console or Console(stderr=True), disable=not is_shown)


class StepProgress:
    """Shows step, loss, learning rate, throughput and the remaining time."""

    def __init__(self, console: LogConsole, first: int, steps: int, unit: str, shown: bool = True) -> None:
        self._console, self._first, self._steps, self._unit = console, first, steps, unit
        self._shown = shown
        self._after_first = 0.0  # when the first step of this process had ended
        self._last_line = float("-inf")
        self._has_bar = shown and console.is_terminal
        # rich takes a string for a column too, whose fields it fills in.
        self._bar = _bars("step {task.completed:.0f}/{task.total:.0f}", "{task.description}", self._has_bar, console)
        self._task = self._bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, lr: float, units_per_second: float | None) -> None:
        """Show that `step` updates are done. A process's first step has no throughput: it compiles and warms up; so
        it does not count for the time left, which is shown from the fifth step on."""
        if not self._shown:
            return
        text = f"loss {loss:.4f}  lr {lr:.3g}"
        if units_per_second is not None:
            text += f"  {units_per_second:,.0f} {self._unit}/s"
        now, taken = time.monotonic(), step - self._first
        if taken == 1:
            self._after_first = now
        if taken >= STEPS_BEFORE_ESTIMATE:
            text += f"  {duration((now - self._after_first) / (taken - 1) * (self._steps - step))} left"
        if self._has_bar:
            self._bar.update(self._task, completed=step, description=text)
            return
        is_due = taken in (1, STEPS_BEFORE_ESTIMATE) or step == self._steps
        if is_due or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._console.print(f"step {step}/{self._steps}  {text}")

    def note(self, text: str) -> None:
        """Print a separate line, above the bar if there is one."""
        if self._shown:
            self._console.print(text)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
