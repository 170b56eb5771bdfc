"""Shows the progress of a sweep, search or ladder: live on a terminal, elsewhere as one line per minute."""

import time
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

from lapcli.experiments.cells import progress
from lapcli.runs import METRICS
from lapcli.runtime.progress import STEPS_BEFORE_ESTIMATE, LogConsole, duration
from lapcli.training.metrics import last_step_metrics

if TYPE_CHECKING:
    from lapcli.experiments.runner import Runner

SECONDS_BETWEEN_LINES = 60.0
SECONDS_BETWEEN_UPDATES = 2.0  # each reads the metrics of the running cells


class Overview:
    def __init__(self, runner: "Runner", console: LogConsole) -> None:
        self._runner, self._console = runner, console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._between = SECONDS_BETWEEN_UPDATES if self._live else SECONDS_BETWEEN_LINES
        self._shown = time.monotonic()

    def __enter__(self) -> "Overview":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def show(self) -> None:
        """Show the current state if an update is due; called at every poll."""
        if time.monotonic() - self._shown < self._between:
            return
        self._shown = time.monotonic()
        lines = self.lines()
        if self._live:
            self._live.update(Text("\n".join(lines)), refresh=True)
        else:
            self._console.print("; ".join(lines))

    def lines(self) -> list[str]:
        """Return a line for all cells and a line for each running cell."""
        runner, running, left = self._runner, [], 0.0
        rates = list(runner.seconds_of_cost)
        for job in runner.jobs:
            cell, what = job.status.cell, job.commands[0][0]
            training = progress(cell, runner.runs_dir)
            line: dict[str, Any] = last_step_metrics(runner.runs_dir / cell.name / METRICS)
            if what != "train" or training.steps is None or not line:
                running.append(f"{cell.name}: {what if what != 'train' else 'starting'}")
                continue
            running.append(f"{cell.name}: step {training.step:,}/{training.steps:,}, loss {line['loss']:.4f}")
            taken = training.step - job.first_step
            if taken >= STEPS_BEFORE_ESTIMATE:
                per_step = (time.monotonic() - job.started) / taken
                left += per_step * (training.steps - training.step)
                rates.append(per_step * training.steps / runner.chooser.cost(cell))
        waiting = [runner.chooser.cost(status.cell) for status in runner.statuses if status.state == "waiting"]
        later = runner.chooser.later()
        done = sum(status.is_settled for status in runner.statuses)
        text = f"{done} of {len(runner.statuses) + len(later)} cells done"
        if rates:
            seconds = left + sum([*waiting, *later]) * sum(rates) / len(rates)
            at_once = max(1, min(runner.slots, len(waiting) + len(later) + len(runner.jobs)))
            text += f", about {duration(seconds / at_once)} left"
        return [text, *running]
