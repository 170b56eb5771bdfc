"""Runs while they train: the status of each, and the curves of several in one plot for the terminal."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lapcli.catalogue.listing import is_of_a_sweep, list_runs, matching_runs
from lapcli.runs import METRICS, read_info, status_of
from lapcli.runtime.errors import UsageError
from lapcli.training.metrics import read_metrics

LETTERS = "abcdefgh"  # one for each run in a picture; more runs become a table
_SHOWN = ("loss", "lr", "tokens_per_second", "images_per_second")


@dataclass(frozen=True)
class WatchedRun:
    """A run at one moment."""

    name: str
    status: str
    step: int
    steps: int | None
    values: dict[str, float]  # of the last step and the last validation
    curve: list[tuple[int, float]]
    is_of_a_sweep: bool = False

    def line(self) -> str:
        at = f"{self.step:,}/{self.steps:,}" if self.steps else f"{self.step:,}"
        numbers = (
            f"{name} {f'{value:,.0f}' if name.endswith('_per_second') and value >= 100 else f'{value:.4g}'}"
            for name, value in self.values.items()
            if name in _SHOWN or name.startswith("validation_")
        )
        return "  ".join([f"{self.name}  step {at}", *numbers, self.status])


def chosen_runs(runs_dir: Path, names: Sequence[str]) -> list[Path]:
    """Return the named runs; without names those that are being trained, else the newest."""
    if names:
        return matching_runs(runs_dir, names)
    listed = list_runs(runs_dir)
    if not listed:
        raise UsageError(f"there are no runs in {runs_dir} to watch; train one, or see --runs-dir")
    return [run.path for run in listed if run.status == "running"] or [listed[0].path]


def check_metric(paths: Sequence[Path], metric: str) -> None:
    """Raise for a name that no run has in its metrics, unless one of them has no metrics yet."""
    named = [set[str]().union(*read_metrics(path / METRICS)) - {"step"} for path in paths]
    known = sorted(set[str]().union(*named))
    if metric not in known and all(named):
        near = get_close_matches(metric, known, 1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise UsageError(f"none of these runs has the metric {metric[:60]!r}; {hint}: {', '.join(known)}")


def read_watched_run(path: Path, metric: str) -> WatchedRun:
    """Read what the run has written so far; a half-written line is left out."""
    info = read_info(path)
    lines = read_metrics(path / METRICS)
    values: dict[str, float] = {}
    # A step and its validation are lines of their own, and the last validation may lie any number of lines back.
    for line in lines:
        values |= {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    # A loss that is not finite has no place on an axis.
    curve = [(line["step"], float(line[metric])) for line in lines if metric in line and math.isfinite(line[metric])]
    step = max([int(info.get("step") or 0), *(line["step"] for line in lines[-1:])])
    return WatchedRun(path.name, status_of(path, info), step, info.get("steps"), values, curve, is_of_a_sweep(path))


def plot_curves(seen: Sequence[WatchedRun], metric: str, width: int, height: int) -> str:
    """Draw the curves in one plot, without colour codes: a line for one run, a letter for each of several."""
    try:
        import plotext
    except ImportError:
        raise UsageError("the package plotext is not installed; pip install 'lapcli[watch]'") from None
    figure: Any = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(metric)
    drawn = [run for run in seen if run.curve]
    for letter, run in zip(LETTERS, drawn, strict=False):
        points = _thinned(run.curve, 2 * width)
        steps, values = [step for step, _ in points], [value for _, value in points]
        signal = figure.signal(steps, values, marker="braille" if len(seen) == 1 else letter)
        if len(seen) == 1 and len(points) > 1:
            signal.lines()
        figure.draw(signal)
    if drawn:
        steps = [step for run in drawn for step, _ in run.curve]
        figure.ruler("x").ticks(_whole_steps(min(steps), max(steps)))
    return str(plotext.uncolorize(str(figure.build()))).rstrip("\n") if drawn else f"(no {metric} yet)"


def _whole_steps(first: int, last: int, most: int = 6) -> list[int]:
    """Return whole-number ticks: multiples of 1, 2 or 5 times a power of ten."""
    sizes = (unit * 10**power for power in itertools.count() for unit in (1, 2, 5))
    size = next(size for size in sizes if (last - first) / size <= most)
    return list(range(-(-first // size) * size, last + 1, size))


def _thinned(curve: Sequence[tuple[int, float]], most: int) -> Sequence[tuple[int, float]]:
    """Leave out points beyond what the columns can show; the last point is kept."""
    every = max(1, len(curve) // most)
    return [*curve[:-1:every], curve[-1]]
