"""What a benchmark is: its name and label, its files and rows, the paper's prompt, and lm-eval's own task.

One file of this package declares one benchmark, and nothing else has to change to add another. These files import
torch and lm-eval inside functions, never at the top, because names and labels are asked for without them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lapcli.evaluation.benchmarks.files import BenchmarkFiles, Document, Documents, load_documents
from lapcli.kinds.kind import CHAT, LANGUAGE
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress

if TYPE_CHECKING:
    from lapcli.evaluation.benchmarks.humaneval import CodeJudge

ProtocolName = Literal["paper", "harness"]
SEED = 1234  # lm-eval's, so that few-shot examples are the ones that it draws
SAMPLING = ("samples", "temperature", "top_k", "max_new_tokens")

# Versions of prompts and scoring: a journal and a score name theirs.
LETTERS_VERSION = 1
GENERATED_VERSION = 2  # since 2, more ways to write a number or a program are read, and the calculator knows //


@dataclass(frozen=True)
class BenchmarkSettings:
    """How a language model is asked: the protocol and, where answers are sampled, the sampling."""

    protocol: ProtocolName
    samples: int = 10
    temperature: float = 1.0
    top_k: int | None = 50
    max_new_tokens: int = 512
    seed: int = SEED

    def to_dict(self) -> dict[str, Any]:
        """Only those that matter: lm-eval's tasks bring their own sampling."""
        if self.protocol == "harness":
            return {"seed": self.seed}
        return {name: getattr(self, name) for name in (*SAMPLING, "seed")}


@dataclass(frozen=True)
class BenchmarkRequest:
    """A run that is asked, and how."""

    run: Run
    settings: BenchmarkSettings
    data: Path | None  # a local folder instead of the hub
    allow_unsafe: bool  # generated code may run without a sandbox
    progress: Progress


@dataclass
class PreparedTask:
    """A benchmark as lm-eval evaluates it, with its documents."""

    name: str
    loaded: dict[str, Any]  # tasks and groups, as lm-eval's `evaluate` takes them
    is_chat: bool  # prompts are conversations
    files: dict[str, str] = field(default_factory=dict)  # sha256 of the data, by file
    judge: "CodeJudge | None" = None  # runs generated programs
    sampling: dict[str, Any] | None = None  # of our own; lm-eval's tasks say theirs in their configuration
    runs_unsafe_code: bool = False

    @property
    def heads(self) -> list[str]:
        """What gets a line of the table: groups that belong to no other group, else every task."""
        groups = self.loaded["groups"]
        inner = {child for group in groups.values() for child in group.child_names}
        tops = [name for name in groups if name not in inner]
        alone = [name for name in self.loaded["tasks"] if name not in inner]
        return [*tops, *alone]


class Benchmark:
    """A subclass declares what is asked and how answers are scored; one instance of it is registered by its name.

    `lap eval --tasks NAME` calls `paper_task` under `--protocol paper` and `lm_eval_task` under `--protocol harness`.
    A benchmark with `files` says by `read_row` what a document is; one without has `documents` of its own.
    """

    name: str
    label: str  # in tables and figures
    help: str
    files: BenchmarkFiles | None = None
    needs: frozenset[str] = frozenset({LANGUAGE})  # of a model
    is_share: bool = True  # its score is a share of the documents, shown in percent
    is_lower_better: bool = False
    lm_eval_file: str | None = None  # of lm-eval's definition, below its folder of tasks
    lm_eval_splits: Sequence[str] = ("test",)  # that this definition asks for

    def check(self, gives: frozenset[str], data: Path | None) -> None:
        """UsageError if a model that gives this cannot be asked; called before it is loaded."""
        if CHAT in self.needs - gives:
            raise UsageError(
                f"{self.name} is asked in chat form, which this run has not learned; use the run of `lap sft`"
            )

    def read_row(self, row: Any, path: Path) -> Document:
        """The document of a row of `path`; Malformed if it is not a row of this benchmark."""
        raise NotImplementedError

    def documents(self, split: str, data: Path | None) -> Documents:
        assert self.files is not None
        return load_documents(self.name, self.files.find(self.name, split, data), self.read_row)

    def paper_task(self, request: BenchmarkRequest) -> PreparedTask:
        """As the paper asks: chat prompts, option letters or pass@k."""
        raise UsageError(f"{self.name} cannot be asked in chat form; use --protocol harness")

    def lm_eval_definition(self) -> dict[str, Any]:
        """lm-eval's definition of the task: prompt, metrics, few-shot examples."""
        from lapcli.evaluation.harness.lm_eval_tasks import read_definition

        if self.lm_eval_file is None:
            raise UsageError(f"lm-eval has no task {self.name}; use --protocol paper with the run of `lap sft`")
        return read_definition(self.lm_eval_file)

    def lm_eval_task(self, request: BenchmarkRequest) -> PreparedTask:
        """As lm-eval asks, over our documents."""
        from lapcli.evaluation.harness.lm_eval_tasks import one_task, with_documents

        splits = {split: self.documents(split, request.data) for split in self.lm_eval_splits}
        loaded = one_task(self.name, with_documents(self.lm_eval_definition(), splits), request.settings.seed)
        return PreparedTask(self.name, loaded, False, files_of(splits))

    def own_task(
        self,
        definition: dict[str, Any],
        documents: Documents,
        *,
        is_chat: bool = True,
        sampling: dict[str, Any] | None = None,
        judge: "CodeJudge | None" = None,
    ) -> PreparedTask:
        """A definition of ours, ready for lm-eval."""
        from lapcli.evaluation.harness.lm_eval_tasks import one_task

        return PreparedTask(self.name, one_task(self.name, definition), is_chat, documents.files, judge, sampling)


def files_of(splits: dict[str, Documents]) -> dict[str, str]:
    return {file: sha for documents in splits.values() for file, sha in documents.files.items()}


def task_definition(name: str, documents: Documents, version: int) -> dict[str, Any]:
    """What every definition of ours begins with: documents that are here already, and no examples before them."""

    def load(**_: Any) -> dict[str, Documents]:
        return {"test": documents}

    return {
        "task": name,
        "custom_dataset": load,
        "test_split": "test",
        "num_fewshot": 0,
        "metadata": {"version": version},
    }


def letters_definition(
    name: str,
    documents: Documents,
    question: Callable[[Document], str],
    labels: Callable[[Document], list[str]],
    right_label: Callable[[Document], int],  # its place among the labels
) -> dict[str, Any]:
    """Multiple choice: right if the label of the right choice is the likeliest answer."""
    return {
        **task_definition(name, documents, LETTERS_VERSION),
        "output_type": "multiple_choice",
        "doc_to_text": question,
        "doc_to_choice": labels,
        "doc_to_target": right_label,
        "metric_list": [_mean("acc")],
    }


Verdicts = Callable[[Sequence[Sequence[str]], Sequence[Document]], list[list[Any]]]


def sampled_definition(
    name: str,
    documents: Documents,
    settings: BenchmarkSettings,
    judge: Verdicts,  # from the answers of all documents to dictionaries with `passed`
    prompt: Callable[[Document], str],
    reference: Callable[[Document], str],
) -> dict[str, Any]:
    """Sampled answers: pass@1 and pass@k of k samples for each document."""
    sizes = sorted({1, settings.samples})

    def results(document: Document, verdicts: Sequence[Sequence[Any]]) -> dict[str, float]:
        passed = [verdict["passed"] for verdict in verdicts[0]]
        return {f"pass@{k}": pass_at(k, passed) for k in sizes}

    return {
        **task_definition(name, documents, GENERATED_VERSION),
        "output_type": "generate_until",
        "repeats": settings.samples,
        "generation_kwargs": {
            "do_sample": settings.temperature > 0,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "max_gen_toks": settings.max_new_tokens,
            "until": [],  # <|assistant_end|> and <|bos|> end an answer
        },
        "filter_list": [
            {
                "name": "verdicts",
                "filter": [
                    {"function": "take_first_k", "k": settings.samples},
                    {"function": "custom", "filter_fn": judge},
                ],
            }
        ],
        "process_results": results,
        "metric_list": [_mean(f"pass@{k}") for k in sizes],
        "doc_to_text": prompt,
        "doc_to_target": reference,
    }


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def pass_at(k: int, passed: Sequence[bool]) -> float:
    """The unbiased estimate from n samples, c of them right: 1 - C(n - c, k) / C(n, k); any() for k = n."""
    n, c = len(passed), sum(passed)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
