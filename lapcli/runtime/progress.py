"""Progress of preparing data, on stderr: a bar on a terminal, a line every so often elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lapcli.data.text.corpus import Progress

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A callback for `prepare_text`."""
    if sys.stderr.isatty():
        with _bar() as progress:
            yield progress
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bars.add_task(doing, total=total)
            bars.update(tasks[doing], completed=done, total=total)

        yield show


def _lines() -> Progress:
    last = time.monotonic()

    def show(doing: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{doing}: {done / max(total, 1):.0%}", file=sys.stderr, flush=True)

    return show
