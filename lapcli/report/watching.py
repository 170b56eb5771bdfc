"""`lap report --watch`: rewrites the page when files of its runs have changed, until none is being trained."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from lapcli.analysis.drawing import FigureFormat
from lapcli.report.assemble import Report
from lapcli.report.collect import RunResult
from lapcli.report.page import write_page
from lapcli.runs import INFO, METRICS
from lapcli.runtime.errors import DataError

# `eval` and `analysis` are folders: every write in them ends with a rename, which changes their time.
_WATCHED = (INFO, METRICS, "summary.json", "eval", "analysis")


def watch_page(
    find: Callable[[], list[Path]], make: Callable[[], Report], path: Path, figure_format: FigureFormat, every: float
) -> None:
    """Rewrite the page whenever its runs, which `find` lists and `make` reads, have changed, until none is being
    trained. Ctrl-C ends it too, without affecting the runs."""
    seen: object = None
    try:
        while True:
            try:
                files = _state(find())  # before `make`: what is written while it reads differs from this next time
                report = make()
            except DataError:
                if seen is None:
                    raise
                time.sleep(every)  # a file that is being replaced at this moment can be read next time
                continue
            runs = report.collection.runs
            is_training = any(run.status == "running" for run in runs)
            state = files, [run.status for run in runs]  # a process that is killed changes no file
            if state != seen or not is_training:
                seen = state
                refresh = max(5, round(every)) if is_training else None
                written = write_page(report, path, figure_format, refresh)[0]
                print(f"{written}  {_progress(runs)}", flush=True)
            if not is_training:
                return
            time.sleep(every)
    except KeyboardInterrupt:  # the usual way to stop; the page is written once more, without its reloading
        if seen is not None:
            write_page(report, path, figure_format)
            print(f"{path} is no longer updated; the runs continue", file=sys.stderr)


def _state(runs: list[Path]) -> list[tuple[str, str, int, int]]:
    """Return sizes and times of the watched files, which change when something is written."""
    sizes = []
    for run in runs:
        for name in _WATCHED:
            file = run / name
            if file.exists():
                status = file.stat()
                sizes.append((run.name, name, status.st_size, status.st_mtime_ns))
    return sizes


def _progress(runs: list[RunResult]) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.status] = counts.get(run.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())
