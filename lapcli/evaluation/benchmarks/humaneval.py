"""HumanEval: Python functions, scored by running the data set's tests in a sandbox (Chen et al., 2021)."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.evaluation.benchmarks import (
    Benchmark,
    Document,
    PreparedTask,
    Verdicts,
    sampled_definition,
    texts_of,
)
from lapcli.evaluation.journal import Journal, line_key
from lapcli.evaluation.tasks import Sampling
from lapcli.runtime.environment import usable_cores
from lapcli.runtime.progress import Progress
from lapcli.sandbox import Candidate, Mode, choose_mode, run_all

if TYPE_CHECKING:
    from lapcli.evaluation.tasks import Request

VERDICTS = 2  # version of the sandbox's judgement; journalled verdicts of another version are not reused
ProgramOf = Callable[[Document, str], str]

# As in nanochat: a block without a language or with `python`, whose fences end and begin a line.
_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


class HumanEval(Benchmark):
    name = folder = "humaneval"
    repository, config = "openai/openai_humaneval", "openai_humaneval"
    official = ("HumanEval.jsonl.gz", "HumanEval.jsonl")
    lm_eval_file = "humaneval/humaneval.yaml"
    is_sampled = True

    def read_row(self, row: Any) -> Document:
        return texts_of(row, "task_id", "prompt", "canonical_solution", "test", "entry_point")

    def paper_task(self, request: "Request") -> PreparedTask:
        judge = CodeJudge(choose_mode(request.unsafe_code_execution), answered_program)
        sampling, splits = request.settings.sampling, {"test": self.documents("test", request.data)}
        definition = sampled_definition(self.name, sampling, judge.verdicts, "prompt", "canonical_solution")
        return self.prepared(definition, splits, request, is_chat=True, sampling=sampling, judge=judge)

    def lm_eval_task(self, request: "Request") -> PreparedTask:
        """Return the task with lm-eval's prompt, stops and lengths; our sandbox, not lm-eval's process, runs
        programs."""
        judge = CodeJudge(choose_mode(request.unsafe_code_execution), _continued_program)
        ours = sampled_definition(self.name, Sampling(samples=1), judge.verdicts, "prompt", "test")
        # lm-eval would ask to confirm `unsafe_code`; the programs run in our sandbox.
        definition = {key: value for key, value in self.lm_eval_definition().items() if key != "unsafe_code"}
        definition |= {key: ours[key] for key in ("filter_list", "process_results", "metric_list")}
        return self.prepared(definition, {"test": self.documents("test", request.data)}, request, judge=judge)


def _continued_program(document: Document, answer: str) -> str:
    """Return the program under lm-eval's protocol: the model continues the signature."""
    return str(document["prompt"]) + answer


def answered_program(document: Document, answer: str) -> str:
    """Return the program under the paper's protocol: the answer's first fenced block, else the full text, after
    the prompt's imports. The signature is not prepended: the model answers with the complete function."""
    block = _BLOCK.search(answer)
    return "\n".join([*_imports(document["prompt"]), "", (block[1] if block else answer).strip()])


def _imports(prompt: str) -> list[str]:
    imports = []
    for line in prompt.splitlines():
        stripped = line.strip()
        if stripped.startswith(("import ", "from ")):
            imports.append(stripped)
        elif stripped and not stripped.startswith("#"):
            break
    return imports


class CodeJudge:
    """A filter of lm-eval that runs every program of a task in the sandbox, several at a time; verdicts are journalled.

    `program_of` makes the program from a document and an answer.
    """

    def __init__(self, mode: Mode, program_of: ProgramOf) -> None:
        self.mode, self._program_of = mode, program_of
        self.journal: Path | None = None
        self.progress: Progress = lambda doing, done, total: None
        self.on_main: Callable[[Callable[[], Any]], Any] = lambda compute: compute()  # of several processes

    @property
    def verdicts(self) -> Verdicts:
        """The filter; a function, because lm-eval copies a method together with its object."""
        return lambda answers, documents: self.on_main(lambda: self._judge(list(answers), documents))

    def _judge(self, answers: list[Sequence[str]], documents: Sequence[Document]) -> list[list[Any]]:
        candidates = [
            Candidate(document["prompt"], self._program_of(document, answer), document["test"], document["entry_point"])
            for document, samples in zip(documents, answers, strict=True)
            for answer in samples
        ]
        keys = [
            line_key("code", VERDICTS, str(self.mode), each.prompt, each.program, each.test, each.entry_point)
            for each in candidates
        ]
        journal = Journal(self.journal)
        known = {key: value for key, value in journal.read().items() if key in set(keys)}
        # By key, so that equal programs of a question run once.
        waiting = {key: candidate for key, candidate in zip(keys, candidates, strict=True) if key not in known}
        try:
            verdicts = run_all(waiting.values(), self.mode, usable_cores())
            for number, (key, verdict) in enumerate(zip(waiting, verdicts, strict=True), start=1):
                known[key] = {"passed": verdict.passed, "reason": verdict.reason}
                journal.add(key, known[key])
                self.progress("running programs", number, len(waiting))
        finally:
            journal.close()
        flat = iter(keys)
        return [[known[next(flat)] for _ in samples] for samples in answers]


HUMANEVAL = HumanEval()
