"""Runs while they train: the status of each, and the curves of several in one plot for the terminal."""

import math
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.catalogue.listing import list_runs, matching_runs
from lapcli.runs import METRICS, read_info, status_of
from lapcli.runtime.environment import require_extra
from lapcli.runtime.errors import UsageError, known_names
from lapcli.training.metrics import read_metrics

LETTERS = "abcdefgh"  # one for each run in a picture
_SHOWN = ("loss", "lr", "tokens_per_second", "images_per_second")


@dataclass(frozen=True)
class WatchedRun:
    """A run at one moment."""

    path: Path
    status: str
    step: int
    steps: int | None
    values: dict[str, float]  # of the last step and the last validation
    curve: list[tuple[int, float]]

    @property
    def name(self) -> str:
        return self.path.name

    def line(self) -> str:
        at = f"{self.step:,}/{self.steps:,}" if self.steps else f"{self.step:,}"
        shown = {key: v for key, v in self.values.items() if key in _SHOWN or key.startswith("validation_")}
        numbers = [f"{key} {f'{v:,.0f}' if key.endswith('_second') else f'{v:.4g}'}" for key, v in shown.items()]
        return "  ".join([f"{self.name}  step {at}", *numbers, self.status])


def chosen_runs(runs_dir: Path, names: Sequence[str], metric: str) -> list[Path]:
    """Return the named runs, else those that are being trained, else the newest; UsageError if none has the metric."""
    listed = [] if names else list_runs(runs_dir)
    if not names and not listed:
        raise UsageError(f"there are no runs in {runs_dir} to watch; train one, or see --runs-dir")
    training = [Path(run["path"]) for run in listed if run["status"] == "running"]
    paths = matching_runs(runs_dir, names) if names else training or [Path(listed[0]["path"])]
    named = [set[str]().union(*read_metrics(path / METRICS)) - {"step"} for path in paths]
    known = sorted(set[str]().union(*named))
    if metric not in known and all(named):  # a run without metrics may have it later
        raise UsageError(f"none of these runs has the metric {metric[:60]!r}{known_names(metric, known)}")
    return paths


def read_watched_run(path: Path, metric: str) -> WatchedRun:
    """Read what the run has written so far; an incomplete line is skipped."""
    info = read_info(path)
    lines = read_metrics(path / METRICS)
    values: dict[str, float] = {}
    # A step and its validation are lines of their own, and the last validation may lie any number of lines back.
    for line in lines:
        values |= {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    # A loss that is not finite has no place on an axis.
    curve = [(line["step"], float(line[metric])) for line in lines if metric in line and math.isfinite(line[metric])]
    step = max([int(info.get("step") or 0), *(line["step"] for line in lines[-1:])])
    return WatchedRun(path, status_of(path, info), step, info.get("steps"), values, curve)


def screen(seen: Sequence[WatchedRun], metric: str) -> str:
    """Return a picture, unless there are too many runs for one, and a line of text for each run."""
    width, height = shutil.get_terminal_size()
    is_drawn = len(seen) <= len(LETTERS)
    letters = [f"{letter}  " if is_drawn and len(seen) > 1 else "" for letter in LETTERS.ljust(len(seen))]
    lines = [letter + run.line() for letter, run in zip(letters, seen, strict=False)]
    shown = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="   ")]
    height = max(8, min(24, height - len(shown) - 2))
    return "\n".join([*([plot_curves(seen, metric, width, height)] if is_drawn else []), *shown])


def plot_curves(seen: Sequence[WatchedRun], metric: str, width: int, height: int) -> str:
    """Draw the curves in one plot, without colour codes: a line for one run, a letter for each of several."""
    require_extra("plotext", "watch")
    import plotext

    drawn = [run for run in seen if run.curve]
    if not drawn:
        return f"(no {metric} yet)"
    figure: Any = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(metric)
    for letter, run in zip(LETTERS, drawn, strict=False):
        # Thinned to what the columns can show; the last point is kept.
        points = [*run.curve[: -1 : max(1, len(run.curve) // (2 * width))], run.curve[-1]]
        steps, values = zip(*points, strict=True)
        signal = figure.signal(list(steps), list(values), marker="braille" if len(seen) == 1 else letter)
        if len(seen) == 1 and len(points) > 1:
            signal.lines()
        figure.draw(signal)
    return str(plotext.uncolorize(str(figure.build()))).rstrip("\n")
