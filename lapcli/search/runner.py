"""Run the trials of both arms and confirm the winner. A search that is killed at any moment can be resumed.

Each round of the loop reads the run directories. It resumes an unfinished trial that no process holds before it
proposes another one, for the arm with fewer trials first. A trial is `lap train` in its own process. At each validation
successive halving may prune it: the process gets SIGTERM, saves and exits, and the run is marked as pruned. A trial
that finishes before the signal arrives counts as finished.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from lapcli.runs import METRICS
from lapcli.runtime.errors import ExitCode, Interrupted, LapError
from lapcli.runtime.signals import StopRequest, stop_on_signal
from lapcli.search.proposals import propose, should_prune
from lapcli.search.result import SearchOutcome, arms_to_confirm, confirmation_cells, confirmation_of
from lapcli.search.trials import (
    CONTROL,
    SEARCH,
    SearchSpec,
    Trial,
    create,
    finished_value,
    known_trials,
    mark_pruned,
    read_trial,
    read_trials,
)
from lapcli.sweep.grid import Cell
from lapcli.sweep.runner import Process, kill_process, reason_in, start_process
from lapcli.sweep.state import lock_cell, log_of

_POLL = 0.2  # seconds
Tell = Callable[[str], None]
Start = Callable[[Sequence[str], IO[bytes], IO[str], Mapping[str, str]], Process]


class SearchRunner:
    """`tell` receives progress messages; `start` starts `lap ARGUMENTS` as a process."""

    def __init__(
        self, spec: SearchSpec, runs_dir: Path, *, tell: Tell, nproc: str = "auto", start: Start = start_process
    ) -> None:
        self.spec, self.runs_dir, self.tell, self.nproc, self.start = spec, runs_dir, tell, nproc, start
        self.failed: dict[str, str] = {}  # name to reason; kept in memory, so that the next start retries them
        self.waited_for: set[str] = set()
        self._settled: dict[str, tuple[int, Trial]] = {}

    def run(self) -> SearchOutcome:
        """Return the outcome; on a signal, let the running trial save and raise Interrupted."""
        with stop_on_signal(lambda name: self.tell(f"{name}: the running trial finishes its step and saves")) as stop:
            self._search(stop)
            trials = self._trials()
            outcome = SearchOutcome(trials, None, self._notes(trials))
            pair = arms_to_confirm(self.spec, trials)
            if pair is not None:
                self._confirm(pair, stop)
                outcome.confirmation = confirmation_of(self.spec, pair, self.runs_dir)
        return outcome

    def _search(self, stop: StopRequest) -> None:
        while True:
            self._check(stop)
            trials = self._trials()
            if self._resume_one(trials, stop):
                continue
            arms = sorted((SEARCH, CONTROL), key=lambda arm: (len(trials[arm]), arm))
            begun = [arm for arm in arms if self._may_begin(arm, trials[arm]) and self._begin(arm, trials[arm])]
            if begun:
                continue
            running = [trial.name for arm in trials.values() for trial in arm if not self._is_done(trial)]
            if not running:
                return
            self._wait_for(running)

    def _is_done(self, trial: Trial) -> bool:
        return trial.is_settled or trial.name in self.failed

    def _wait_for(self, names: Sequence[str]) -> None:
        if new := set(names) - self.waited_for:
            self.waited_for |= new
            self.tell(f"waiting for {', '.join(sorted(new))}, held by another process")
        time.sleep(_POLL)

    def _may_begin(self, arm: str, trials: Sequence[Trial]) -> bool:
        """Return whether the arm may start another trial. A trial that has started is always trained to its end."""
        return len(trials) < self.spec.trials and not self._used_up(trials)

    def _used_up(self, trials: Sequence[Trial]) -> str:
        """Return the option whose budget these trials have used up, or an empty string."""
        spec = self.spec
        if spec.max_steps is not None and sum(trial.step for trial in trials) >= spec.max_steps:
            return f"--max-steps {spec.max_steps}"
        if spec.max_hours is not None and sum(trial.seconds for trial in trials) >= 3600 * spec.max_hours:
            return f"--max-hours {spec.max_hours:g}"
        return ""

    def _begin(self, arm: str, trials: Sequence[Trial]) -> bool:
        """Propose and create the arm's next trial, which the next round trains; return False if none is left."""
        number = len(trials)
        # A cell for its name alone: the lock has to be held before the parameters are known.
        name = Cell(self.spec.trial_name(arm, number), self.spec.space.recipe, (), {}, self.spec.space.base)
        lock = lock_cell(name, self.runs_dir)
        if lock is None:  # another process is proposing this trial
            time.sleep(_POLL)
            return True
        with lock:
            # Read again under the lock: the process that held it before may have created this trial.
            known = self._trials()[arm]
            if len(known) > number:
                return True
            params = propose(self.spec, arm, known)
            if params is None:
                return False
            create(self.spec, self.runs_dir, self.spec.cell(arm, number, params), arm, number, known_trials(known))
        return True

    def _resume_one(self, trials: Mapping[str, Sequence[Trial]], stop: StopRequest) -> bool:
        """Train the first unfinished trial that no process holds; return whether there was one."""
        unsettled = sorted(
            (trial for arm in trials.values() for trial in arm if not self._is_done(trial)),
            key=lambda trial: (trial.number, trial.arm),
        )
        for trial in unsettled:
            cell = self.spec.cell(trial.arm, trial.number, trial.params)
            lock = lock_cell(cell, self.runs_dir)
            if lock is None:
                continue
            with lock:
                current = self._trial(trial)
                # Running although its lock is free: someone trains it by hand, with `lap train`.
                if not self._is_done(current) and current.state != "running":
                    self._train_trial(current, cell, lock, stop)
                    return True
        return False

    def _trials(self) -> dict[str, list[Trial]]:
        return read_trials(self.spec, self.runs_dir, self._settled)

    def _trial(self, trial: Trial) -> Trial:
        return read_trial(self.spec, self.runs_dir, trial.arm, trial.number)

    def _stops(self, trial: Trial) -> bool:
        return should_prune(self.spec, trial.arm, self._trials()[trial.arm], trial.number)

    def _train_trial(self, trial: Trial, cell: Cell, lock: IO[str], stop: StopRequest) -> None:
        if trial.reports and self._stops(trial):  # a search was killed after it stopped the trial, before marking it
            mark_pruned(self.runs_dir, trial.name)
            return
        self.tell(f"{trial.name}: {'resuming' if trial.step else 'training'}  {in_words(trial)}")
        seen, size, stops = len(trial.reports), -1, False
        metrics = self.runs_dir / trial.name / METRICS

        def look() -> bool:
            """Return whether to stop the trial at a validation that is new since the last call."""
            nonlocal seen, size, stops
            before, size = size, metrics.stat().st_size if metrics.is_file() else 0
            if size == before:
                return stops
            current = self._trial(trial)
            if len(current.reports) > seen:
                seen = len(current.reports)
                stops = current.state == "running" and self._stops(current)
            return stops

        code = self._train(cell, lock, stop, look)
        ended = self._trial(trial)
        if stops and ended.state == "interrupted":
            mark_pruned(self.runs_dir, trial.name)
            self.tell(f"{trial.name}: pruned at step {ended.step}, {self.spec.metric} {ended.reports[-1][1]:.4f}")
        elif ended.state == "finished":
            self.tell(f"{trial.name}: {self.spec.metric} {ended.value:.4f}")
        elif ended.state == "diverged":
            self.tell(f"{trial.name}: diverged")
        elif code not in (ExitCode.DONE, ExitCode.INTERRUPTED) and not stop:
            self.failed[trial.name] = reason_in(log_of(cell, self.runs_dir), self._log_start, code)
            self.tell(f"{trial.name}: failed: {self.failed[trial.name].splitlines()[0]}")
        self._check(stop)

    def _train(self, cell: Cell, lock: IO[str], stop: StopRequest, look: Callable[[], bool]) -> int:
        arguments = [*cell.arguments(self.runs_dir), "--nproc", self.nproc]
        with log_of(cell, self.runs_dir).open("ab") as log:
            self._log_start = log.tell()
            process = self.start(arguments, log, lock, {})
            asked = False
            try:
                while (code := process.poll()) is None:
                    # Once: a second SIGTERM would end the trial at once, without a save.
                    if (stop or look()) and not asked:
                        asked = True
                        process.send_signal(signal.SIGTERM)
                    time.sleep(_POLL)
            except KeyboardInterrupt:  # the second Ctrl-C or SIGTERM
                kill_process(process)
                raise
            except BaseException:  # a damaged file that `look` reads, say: the trial saves instead of training on alone
                process.send_signal(signal.SIGTERM)
                process.wait()
                raise
        return code

    def _confirm(self, pair: tuple[Trial, Trial], stop: StopRequest) -> None:
        """Train the winner and the best control on fresh seeds."""
        while True:
            self._check(stop)
            left = [
                cell
                for cells in confirmation_cells(self.spec, pair)
                for cell in cells
                if finished_value(self.spec, self.runs_dir, cell) is None and cell.name not in self.failed
            ]
            if not left:
                return
            for cell in left:
                lock = lock_cell(cell, self.runs_dir)
                if lock is None:
                    continue
                with lock:
                    if finished_value(self.spec, self.runs_dir, cell) is None:
                        self.tell(f"{cell.name}: confirming")
                        code = self._train(cell, lock, stop, lambda: False)
                        if code not in (ExitCode.DONE, ExitCode.INTERRUPTED):
                            self.failed[cell.name] = reason_in(log_of(cell, self.runs_dir), self._log_start, code)
                break
            else:
                self._wait_for([cell.name for cell in left])

    def _check(self, stop: StopRequest) -> None:
        if stop:
            raise Interrupted(f"stopped by {stop.name}; the running trial is saved. Run the same command to resume.")

    def _notes(self, trials: Mapping[str, Sequence[Trial]]) -> list[str]:
        spec = self.spec
        notes = [f"{name} failed: {reason.splitlines()[0]}" for name, reason in self.failed.items()]
        for arm, own in trials.items():
            option = self._used_up(own)
            if option and len(own) < spec.trials:
                count = f"{len(own)} of {spec.trials} trials"
                notes.append(f"the {arm} arm has used up {option} after {count}; raise the budget to resume it")
            elif len(own) < min(spec.trials, len(trials[SEARCH])):
                notes.append(f"the {arm} arm has tried all of its combinations, in {len(own)} trials")
        return notes


def refuse_without_result(outcome: SearchOutcome) -> None:
    """Raise LapError if an arm has no finished trial, because then there is nothing to compare."""
    for arm, trials in outcome.trials.items():
        if any(trial.value is not None for trial in trials):
            continue
        if trials and all(trial.state == "diverged" for trial in trials):
            raise LapError(
                f"all {len(trials)} trials of the {arm} arm diverged; narrow the space, e.g. to lower learning rates"
            )
        states = ", ".join(f"{trial.name} {trial.state}" for trial in trials[:5]) or "none was started"
        raise LapError(
            f"no trial of the {arm} arm has finished ({states}); see the logs in .sweeps, or run the same command to "
            "retry the failed ones"
        )


def in_words(trial: Trial) -> str:
    return "  ".join(f"{name}={value}" for name, value in trial.params.items())
