"""The parts of a benchmark: its name and label, its files and rows, the paper's prompt, and lm-eval's own task.

One file of this package declares one benchmark, and nothing else has to change to add another. These files import
torch and lm-eval inside functions, never at the top, so that names and labels can be looked up without them.

The rows of a benchmark are on the hub or in a local folder. `--data DIR` is a folder that holds the benchmarks' folders
(`DIR/arc`, `DIR/mmlu` ...), or one of these. In each of them the first form that exists is read; a benchmark that is
missing there is an error, never another source.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lapcli.data.chat.conversation import Malformed
from lapcli.data.chat.formats import multiple_choice_question
from lapcli.data.file_formats import read_rows
from lapcli.data.source_files import cached_hub_files, hub_files, unreachable
from lapcli.recipe.schema import CHAT, LANGUAGE
from lapcli.runs import Run
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import sha256_of_file
from lapcli.runtime.progress import Progress

if TYPE_CHECKING:
    from lapcli.evaluation.benchmarks.humaneval import CodeJudge


Document = dict[str, Any]


class Documents(list[Document]):
    """Documents with the part of a data set's interface that lm-eval uses; `files`: those that were read, with their
    sha256."""

    def __init__(self, documents: Sequence[Document], files: Mapping[str, str]) -> None:
        super().__init__(documents)
        self.files = dict(files)

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0])

    def by(self, key: str) -> "dict[str, Documents]":
        """Group the documents by the value of a key, in their order."""
        groups: dict[str, Documents] = {}
        for document in self:
            groups.setdefault(document[key], Documents([], self.files)).append(document)
        return groups


@dataclass(frozen=True)
class BenchmarkFiles:
    repository: str  # on the hub
    hub: Mapping[str, str]  # split: its file there
    folders: Sequence[str]  # names of its folder within DIR, the usual one first
    local: Mapping[str, Sequence[str]]  # split: patterns of files in that folder, the first that matches is read

    def find(self, benchmark: str, split: str, data: Path | None) -> list[Path]:
        """Return local paths of the files, downloaded if necessary, in the order in which they are read."""
        if data is None:
            return self._from_hub(benchmark, split)
        if not data.is_dir():
            raise DataError(
                f"--data {data} is not a folder; it holds the benchmarks' folders, such as {self.folders[0]}"
            )
        patterns = self.local[split]
        for folder in [*(data / name for name in self.folders), data]:
            for pattern in patterns:
                if paths := sorted(path for path in folder.glob(pattern) if path.is_file()):
                    return paths
        usual = data if data.name in self.folders else data / self.folders[0]
        raise DataError(
            f"{benchmark}: there is no {split} file in {data}; expected {usual / patterns[0]}, or "
            f"{', '.join(patterns[1:4])} beside it"
        )

    def _from_hub(self, benchmark: str, split: str) -> list[Path]:
        name = self.hub[split]
        if cached := cached_hub_files(self.repository, [name], None):
            return cached
        problem = "HF_HUB_OFFLINE is set" if hub_is_offline() else unreachable()
        if problem is None:
            try:
                return hub_files(self.repository, [name], None)
            except DataError as error:
                problem = str(error.__cause__ or error).splitlines()[0][:200]
        raise DataError(
            f"{benchmark}: {name} of the hub's {self.repository} is not on this machine and cannot be downloaded "
            f"({problem}); put {self.local[split][0]} into DIR/{self.folders[0]} and use --data DIR, or run "
            f"`hf download --repo-type dataset {self.repository} {name}` where there is a network"
        )


def plain_names(split: str, name: str) -> tuple[str, ...]:
    """Return the obvious names of a split's file: `test.jsonl`, `gsm8k_test.parquet` ..."""
    ends = ("jsonl", "jsonl.gz", "parquet", "csv")
    return tuple(f"{place}.{end}" for place in (split, f"{name}_{split}") for end in ends)


def load_documents(benchmark: str, paths: Sequence[Path], read_row: Callable[[Any, Path], Document]) -> Documents:
    """Read the rows of the files; one that `read_row` refuses with Malformed is an error with its file and row."""
    documents: list[Document] = []
    for path in paths:
        for number, row in enumerate(_rows(path), start=1):
            try:
                documents.append(read_row(row, path))
            except Malformed as error:
                raise DataError(
                    f"{benchmark}: {path} row {number} is not a row of {benchmark} ({error}); "
                    "correct it, or check --data"
                ) from None
    if not documents:
        raise DataError(f"{benchmark}: {paths[0]} has no rows; download it again, or check --data")
    return Documents(documents, {str(path): sha256_of_file(path) for path in paths})


def texts_of(row: Any, *names: str) -> Document:
    """Return these fields of a row, each of which has to be text."""
    for name in names:
        if not isinstance(row, Mapping) or not isinstance(row.get(name), str):
            raise Malformed(f"no text under {name!r}")
    return {name: row[name] for name in names}


def _rows(path: Path) -> Iterator[Any]:
    """Read the rows of a file. A csv with a header gives dictionaries; one without (MMLU's own) lists of cells."""
    rows = read_rows(path)
    if not path.name.endswith(".csv"):
        yield from rows
        return
    first = next(rows, None)
    if first is None:
        return
    if {"question", "answer"} <= set(first) or {"prompt", "test"} <= set(first):
        for row in rows:
            yield dict(zip(first, row, strict=False))
    else:
        yield from chain([first], rows)


ProtocolName = Literal["paper", "harness"]
SEED = 1234  # lm-eval's default, so that the few-shot examples are the ones that it draws
SAMPLING = ("samples", "temperature", "top_k", "max_new_tokens")

# Versions of prompts and scoring, which journals and scores record.
LETTERS_VERSION = 1
GENERATED_VERSION = 3  # since 3, numbers and programs are read as nanochat reads them; since 2, the calculator knows //


@dataclass(frozen=True)
class BenchmarkSettings:
    """How a language model is asked: the protocol and, if answers are sampled, the sampling."""

    protocol: ProtocolName
    samples: int = 10
    temperature: float = 1.0
    top_k: int | None = 50
    max_new_tokens: int = 512
    seed: int = SEED

    def to_dict(self) -> dict[str, Any]:
        """Return only the settings in use: lm-eval's tasks bring their own sampling."""
        if self.protocol == "harness":
            return {"seed": self.seed}
        return {name: getattr(self, name) for name in (*SAMPLING, "seed")}


@dataclass(frozen=True)
class BenchmarkRequest:
    """The run to ask, and how to ask it."""

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
    sampling: dict[str, Any] | None = None  # `settings.to_dict()`; lm-eval's tasks have theirs in their configuration
    runs_unsafe_code: bool = False

    @property
    def heads(self) -> list[str]:
        """The groups and tasks that get a line of the table: those that belong to no other group."""
        groups = self.loaded["groups"]
        members = {child for group in groups.values() for child in group.child_names}
        return [name for name in (*groups, *self.loaded["tasks"]) if name not in members]


class Benchmark:
    """A benchmark. A subclass declares what is asked and how answers are scored; its instance is registered by name.

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
        """Raise UsageError if a model that gives this cannot be asked; called before the model is loaded."""
        if CHAT in self.needs - gives:
            raise UsageError(
                f"{self.name} is asked in chat form, which this run has not learned; use the run of `lap sft`"
            )

    def read_row(self, row: Any, path: Path) -> Document:
        """Return the document of a row of `path`; raise Malformed if it is not a row of this benchmark."""
        raise NotImplementedError

    def documents(self, split: str, data: Path | None) -> Documents:
        assert self.files is not None
        return load_documents(self.name, self.files.find(self.name, split, data), self.read_row)

    def paper_task(self, request: BenchmarkRequest) -> PreparedTask:
        """Return the task as the paper asks it: chat prompts, option letters or pass@k."""
        raise UsageError(f"{self.name} cannot be asked in chat form; use --protocol harness")

    def lm_eval_definition(self) -> dict[str, Any]:
        """Return lm-eval's definition of the task: prompt, metrics, few-shot examples."""
        from lapcli.evaluation.harness.lm_eval_tasks import read_definition

        if self.lm_eval_file is None:
            raise UsageError(f"lm-eval has no task {self.name}; use --protocol paper with the run of `lap sft`")
        return read_definition(self.lm_eval_file)

    def lm_eval_task(self, request: BenchmarkRequest) -> PreparedTask:
        """Return the task as lm-eval asks it, over our documents."""
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
        """Prepare a definition of ours for lm-eval."""
        from lapcli.evaluation.harness.lm_eval_tasks import one_task

        return PreparedTask(self.name, one_task(self.name, definition), is_chat, documents.files, judge, sampling)


def files_of(splits: dict[str, Documents]) -> dict[str, str]:
    return {file: sha for documents in splits.values() for file, sha in documents.files.items()}


def task_definition(name: str, documents: Documents, version: int) -> dict[str, Any]:
    """Return the common part of our definitions: documents that are already loaded, and zero-shot prompts."""

    def load(**_: Any) -> dict[str, Documents]:
        return {"test": documents}

    return {
        "task": name,
        "custom_dataset": load,
        "test_split": "test",
        "num_fewshot": 0,
        "metadata": {"version": version},
    }


def prompt_form(run: Run) -> str:
    """Return whose words a chat run was fine-tuned with: nanochat's, if it was imported from there, or ours."""
    return str(run.info.get("prompt_form", "lap"))


def choices_prompt(form: str, question: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    """Word a multiple-choice question as in fine-tuning."""
    if form != "nanochat":
        return multiple_choice_question(question, choices, labels)
    lines = [f"- {choice}={label}" for choice, label in zip(choices, labels, strict=True)]
    instruction = "Respond only with the letter of the correct answer."
    return "\n".join([f"Multiple Choice question: {question}", *lines, "", instruction])


def letters_definition(
    name: str,
    documents: Documents,
    question: Callable[[Document], str],
    labels: Callable[[Document], list[str]],
    right_label: Callable[[Document], int],  # its place among the labels
) -> dict[str, Any]:
    """Define a multiple-choice task: an answer is right if the label of the right choice is the likeliest one."""
    return {
        **task_definition(name, documents, LETTERS_VERSION),
        "output_type": "multiple_choice",
        "doc_to_text": question,
        # In chat form lm-eval puts no space before a choice, so that it is the token of the prompt's own letter.
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
    """Return the definition of a task with sampled answers: pass@1 and pass@k of k samples for each document."""
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
            # Must be given: lm-eval's default is to stop at a blank line.
            "until": [],  # <|assistant_end|> and <|bos|> end an answer
        },
        "filter_list": [
            {
                "name": "verdicts",
                "filter": [
                    # lm-eval's default filter keeps one sample.
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
    """Estimate pass@k without bias from n samples, c of them right: 1 - C(n - c, k) / C(n, k); any() for k = n."""
    n, c = len(passed), sum(passed)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
