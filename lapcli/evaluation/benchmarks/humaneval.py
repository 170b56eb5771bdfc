"""HumanEval: Python functions, scored by running the data set's tests in a sandbox (Chen et al., 2021)."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lapcli.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkRequest,
    BenchmarkSettings,
    Document,
    Documents,
    PreparedTask,
    pass_at,
    plain_names,
    sampled_definition,
    texts_of,
)
from lapcli.evaluation.harness.journal import Journal, line_key
from lapcli.runtime.machine import usable_cores
from lapcli.runtime.progress import Progress
from lapcli.sandbox import Candidate, Mode, choose_mode, run_all

VERDICTS = 2  # version of the sandbox's judgement; journalled verdicts of another version are not reused
ProgramOf = Callable[[Document, str], str]

# As nanochat: a block without a language or of `python`, whose fences end a line and begin one.
_BLOCK = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


class HumanEval(Benchmark):
    name = "humaneval"
    label = "HumanEval"
    help = "Python functions, by running their tests"
    lm_eval_file = "humaneval/humaneval.yaml"
    files = BenchmarkFiles(
        "openai/openai_humaneval",
        {"test": "openai_humaneval/test-00000-of-00001.parquet"},
        ("humaneval", "openai_humaneval", "openai/openai_humaneval"),
        {
            "test": (
                "HumanEval.jsonl.gz",
                "HumanEval.jsonl",
                "openai_humaneval/test-*.parquet",
                *plain_names("test", "humaneval"),
            )
        },
    )

    def read_row(self, row: Any, path: Path) -> Document:
        return texts_of(row, "task_id", "prompt", "canonical_solution", "test", "entry_point")

    def definition(self, documents: Documents, settings: BenchmarkSettings, judge: "CodeJudge") -> dict[str, Any]:
        return sampled_definition(self.name, documents, settings, judge.__call__, _prompt, _solution)

    def paper_task(self, request: BenchmarkRequest) -> PreparedTask:
        documents, settings = self.documents("test", request.data), request.settings
        judge = CodeJudge(choose_mode(request.allow_unsafe), answered_program, request.progress)
        definition = self.definition(documents, settings, judge)
        return self.own_task(definition, documents, sampling=settings.to_dict(), judge=judge)

    def lm_eval_task(self, request: BenchmarkRequest) -> PreparedTask:
        """Return the task with lm-eval's prompt, stops and lengths; our sandbox, not lm-eval's process, runs
        programs."""
        from lapcli.evaluation.harness.lm_eval_tasks import one_task, with_documents

        documents = self.documents("test", request.data)
        judge = CodeJudge(choose_mode(request.allow_unsafe), _continued_program, request.progress)
        definition = {
            # lm-eval would ask to confirm `unsafe_code`; the programs run in our sandbox.
            **{key: value for key, value in self.lm_eval_definition().items() if key != "unsafe_code"},
            # lm-eval's own name of the filter, so that results have the same keys.
            "filter_list": [{"name": "create_test", "filter": [{"function": "custom", "filter_fn": judge.__call__}]}],
            "process_results": _pass_at_1,
            "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
        }
        loaded = one_task(self.name, with_documents(definition, {"test": documents}), request.settings.seed)
        return PreparedTask(self.name, loaded, False, documents.files, judge)


def _prompt(document: Document) -> str:
    return str(document["prompt"])


def _solution(document: Document) -> str:
    return str(document["canonical_solution"])


def _pass_at_1(document: Document, verdicts: Sequence[Sequence[Any]]) -> dict[str, float]:
    return {"pass@1": pass_at(1, [verdict["passed"] for verdict in verdicts[0]])}


def answered_program(document: Document, answer: str) -> str:
    """Return the program under the paper's protocol: a chat model answers with the whole function."""
    return python_program(document["prompt"], answer)


def _continued_program(document: Document, answer: str) -> str:
    """Return the program under lm-eval's protocol: the model continues the head of the function."""
    return str(document["prompt"]) + answer


def python_program(prompt: str, answer: str) -> str:
    """Extract the program from an answer: its first fenced block, else all of it, after the prompt's imports.

    The head of the function is not put before it: the model answers with the whole function.
    """
    block = _BLOCK.search(answer)
    return "\n".join([*_imports(prompt), "", (block[1] if block else answer).strip()])


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

    def __init__(self, mode: Mode, program_of: ProgramOf, progress: Progress, workers: int | None = None) -> None:
        self.mode = mode
        self.journal: Path | None = None
        self._program_of, self._progress = program_of, progress
        self._workers = workers or usable_cores()

    def __call__(self, answers: Iterable[Sequence[str]], documents: Sequence[dict[str, Any]]) -> list[list[Any]]:
        answers = list(answers)  # a filter before this one may hand on an iterator
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
            verdicts = run_all(waiting.values(), self.mode, self._workers)
            for number, (key, verdict) in enumerate(zip(waiting, verdicts, strict=True), start=1):
                known[key] = {"passed": verdict.passed, "reason": verdict.reason}
                journal.add(key, known[key])
                self._progress("running programs", number, len(waiting))
        finally:
            journal.close()
        flat = iter(keys)
        return [[known[next(flat)] for _ in samples] for samples in answers]


HUMANEVAL = HumanEval()
