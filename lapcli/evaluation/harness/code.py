"""Verdicts on generated Python: every program of a task is run in the sandbox, several at a time."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lapcli.evaluation.harness.journal import Journal, line_key
from lapcli.runtime.machine import usable_cores
from lapcli.runtime.progress import Progress
from lapcli.sandbox import Candidate, Mode, run_all

VERDICTS = 2  # of what the sandbox judges right: a journal's verdicts of another version are given anew
ProgramOf = Callable[[dict[str, Any], str], str]


class CodeJudge:
    """A filter of lm-eval: all answers of a task become verdicts. Verdicts are journalled as they come."""

    def __init__(self, mode: Mode, program_of: ProgramOf, progress: Progress, workers: int | None = None) -> None:
        self.mode = mode
        self.journal: Path | None = None
        self._program_of, self._progress = program_of, progress
        self._workers = workers or usable_cores()

    def __call__(self, answers: Iterable[Sequence[str]], documents: Sequence[dict[str, Any]]) -> list[list[Any]]:
        answers = list(answers)  # a filter before this one may hand on an iterator
        candidates = [
            Candidate(document["prompt"], self._program_of(document, answer), document["test"], document["entry_point"])
            for document, given in zip(documents, answers, strict=True)
            for answer in given
        ]
        keys = [
            line_key("code", VERDICTS, str(self.mode), each.prompt, each.program, each.test, each.entry_point)
            for each in candidates
        ]
        journal = Journal(self.journal)
        found = {key: value for key, value in journal.read().items() if key in set(keys)}
        waiting = {key: candidate for key, candidate in zip(keys, candidates, strict=True) if key not in found}
        try:
            verdicts = run_all(waiting.values(), self.mode, self._workers)
            for number, (key, verdict) in enumerate(zip(waiting, verdicts, strict=True), start=1):
                found[key] = {"passed": verdict.passed, "reason": verdict.reason}
                journal.add(key, found[key])
                self._progress("running programs", number, len(waiting))
        finally:
            journal.close()
        flat = iter(keys)
        return [[found[next(flat)] for _ in given] for given in answers]
