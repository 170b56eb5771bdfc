"""Benchmarks of language models: the declaration of a benchmark, and the registry of names.

A benchmark has a name, files and rows, the paper's prompt, and lm-eval's own task. It is one class in one
file, which imports torch and lm-eval inside functions, never at the top, so that names can be looked up without
them.

The rows are on the hub or in a local folder. `--data DIR` is a folder that holds the benchmarks' folders (`DIR/arc`,
`DIR/mmlu` ...) with the hub's files, or one of these; a missing benchmark is an error; no other source is
tried.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.data.chat.conversation import Malformed
from lapcli.data.files import read_rows
from lapcli.data.sources import hub_files
from lapcli.recipe.schema import CHAT, LANGUAGE
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import sha256_of_file
from lapcli.runtime.plugins import Registry

if TYPE_CHECKING:
    from lapcli.evaluation.benchmarks.humaneval import CodeJudge
    from lapcli.evaluation.tasks import Request, Sampling

# Versions of prompts and scoring, which journals and scores record.
LETTERS_VERSION = 1
GENERATED_VERSION = 3  # since 3, numbers and programs are read as nanochat reads them; since 2, the calculator knows //

Document = dict[str, Any]


class Documents(list[Document]):
    """Documents with the subset of a data set's interface that lm-eval uses; `files`: the source files with their
    sha256."""

    def __init__(self, documents: Sequence[Document], files: Mapping[str, str]) -> None:
        super().__init__(documents)
        self.files = dict(files)

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0])


@dataclass
class PreparedTask:
    """A benchmark in lm-eval's form, with its documents."""

    name: str
    loaded: dict[str, Any]  # tasks and groups, as lm-eval's `evaluate` takes them
    is_chat: bool = False  # prompts are conversations
    files: dict[str, str] = field(default_factory=dict)  # sha256 of the data, by file
    judge: "CodeJudge | None" = None  # runs generated programs
    sampling: "Sampling | None" = None  # None: answers are not sampled, or as lm-eval's task says


class Benchmark:
    """A benchmark. A subclass declares the questions and the scoring; its instance is registered by name.

    `lap eval --tasks NAME` calls `paper_task` under `--protocol paper` and `lm_eval_task` under `--protocol harness`.
    With files, `read_row` returns a row's document; without files, the subclass overrides `documents`.
    """

    name: str
    needs: frozenset[str] = frozenset({LANGUAGE})  # of a model
    repository: str  # on the hub
    config: str  # folder of its files there
    folder: str  # in DIR
    official: Sequence[str] = ()  # its authors' own files, with {split}
    lm_eval_file: str | None = None  # of lm-eval's definition, below its folder of tasks
    lm_eval_splits: Sequence[str] = ("test",)  # that this definition asks for
    is_sampled: bool = False  # under the paper's protocol

    def check(self, gives: frozenset[str], data: Path | None) -> None:
        """Raise UsageError if a model with these abilities cannot be evaluated; called before the model is loaded."""
        if CHAT in self.needs - gives:
            raise UsageError(
                f"{self.name} uses chat prompts, for which this run was not trained; use a run of `lap sft`"
            )

    def read_row(self, row: Any) -> Document:
        """Return the document of a row; raise Malformed if it is not a row of this benchmark."""
        raise NotImplementedError

    def documents(self, split: str, data: Path | None) -> Documents:
        """Read the rows; a row that `read_row` rejects raises an error with its file and number."""
        documents: list[Document] = []
        paths = self._from_hub(split) if data is None else self._from_folder(split, data)
        for path in paths:
            for number, row in enumerate(read_rows(path), start=1):
                try:
                    documents.append(self.read_row(row))
                except Malformed as error:
                    raise DataError(
                        f"{self.name}: {path} row {number} is not a row of {self.name} ({error}); "
                        "correct it, or check --data"
                    ) from None
        if not documents:
            raise DataError(f"{self.name}: {paths[0]} has no rows; download it again, or check --data")
        return Documents(documents, {str(path): sha256_of_file(path) for path in paths})

    def _names(self, split: str) -> list[str]:
        """Return the names that a split's file may have in its folder: the hub's, and the authors' own."""
        files = [f"{self.config}/{split}-00000-of-00001.parquet", f"{self.config}/{split}.jsonl", *self.official]
        return [name.format(split=split) for name in files]

    def _from_folder(self, split: str, data: Path) -> list[Path]:
        if not data.is_dir():
            raise DataError(f"--data {data} is not a folder; it holds the benchmarks' folders, such as {self.folder}")
        names = self._names(split)
        for place in (data / self.folder, data / self.folder / "hf", data, data / "hf"):
            if paths := [place / name for name in names if (place / name).is_file()]:
                return paths[:1]
        raise DataError(f"{self.name}: there is no {split} file in {data}; expected {data / self.folder / names[0]}")

    def _from_hub(self, split: str) -> list[Path]:
        name = self._names(split)[0]
        try:
            return hub_files(self.repository, [name], None)
        except DataError as error:
            raise DataError(
                f"{self.name}: {str(error).split(';')[0]}; put {name} into DIR/{self.folder} and use --data DIR, or "
                f"run `hf download --repo-type dataset {self.repository} {name}` where there is a network"
            ) from None

    def paper_task(self, request: "Request") -> PreparedTask:
        """Return the task in the paper's form: chat prompts, multiple choice or pass@k."""
        raise UsageError(f"{self.name} has no chat form; use --protocol harness")

    def lm_eval_definition(self) -> dict[str, Any]:
        """Return lm-eval's definition of the task: prompt, metrics, few-shot examples."""
        from lapcli.evaluation.language_tasks import read_definition

        if self.lm_eval_file is None:
            raise UsageError(f"lm-eval has no task {self.name}; use --protocol paper with the run of `lap sft`")
        return read_definition(self.lm_eval_file)

    def lm_eval_task(self, request: "Request") -> PreparedTask:
        """Return lm-eval's task over our documents."""
        splits = {split: self.documents(split, request.data) for split in self.lm_eval_splits}
        return self.prepared(self.lm_eval_definition(), splits, request)

    def prepared(
        self, definition: dict[str, Any], splits: "Mapping[str, Documents]", request: "Request", **known: Any
    ) -> PreparedTask:
        """Prepare a definition, ours or lm-eval's, over our documents; `known` are additional task fields."""
        from lapcli.evaluation.language_tasks import task_over

        loaded = {"tasks": {self.name: task_over(definition, splits, request.seed)}, "groups": {}, "group_map": {}}
        return PreparedTask(self.name, loaded, files=files_of(splits), **known)


def files_of(splits: Mapping[str, Documents]) -> dict[str, str]:
    return {file: sha for documents in splits.values() for file, sha in documents.files.items()}


def texts_of(row: Any, *names: str) -> Document:
    """Return these fields of a row, each of which must be text."""
    for name in names:
        if not isinstance(row, Mapping) or not isinstance(row.get(name), str):
            raise Malformed(f"no text under {name!r}")
    return {name: row[name] for name in names}


def task_definition(name: str, version: int, **definition: Any) -> dict[str, Any]:
    """Return our own definition: zero-shot, over the documents of the split `test`."""
    return {"task": name, "test_split": "test", "num_fewshot": 0, "metadata": {"version": version}, **definition}


def letters_definition(
    name: str,
    question: Callable[[Document], str],
    labels: Callable[[Document], list[str]],
    right_label: Callable[[Document], int],  # its place among the labels
) -> dict[str, Any]:
    """Define a multiple-choice task: an answer is correct if the correct label is the most likely."""
    return task_definition(
        name,
        LETTERS_VERSION,
        output_type="multiple_choice",
        doc_to_text=question,
        # In chat form lm-eval puts no space before a choice, so that it is the token of the prompt's own letter.
        doc_to_choice=labels,
        doc_to_target=right_label,
        metric_list=[_mean("acc")],
    )


Verdicts = Callable[[Sequence[Sequence[str]], Sequence[Document]], list[list[Any]]]


def sampled_definition(
    name: str,
    sampling: "Sampling",
    judge: Verdicts,  # from the answers of all documents to dictionaries with `passed`
    prompt: str,  # key of a document
    reference: str,
) -> dict[str, Any]:
    """Return the definition of a task with sampled answers: pass@1 and pass@k of k samples for each document."""
    samples = sampling.samples
    sizes = sorted({1, samples})

    def results(document: Document, verdicts: Sequence[Sequence[Any]]) -> dict[str, float]:
        passed = [verdict["passed"] for verdict in verdicts[0]]
        return {f"pass@{k}": pass_at(k, passed) for k in sizes}

    return task_definition(
        name,
        GENERATED_VERSION,
        output_type="generate_until",
        repeats=samples,
        generation_kwargs={
            "do_sample": sampling.temperature > 0,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "max_gen_toks": sampling.max_tokens,
            # Must be given: lm-eval's default is to stop at a blank line.
            "until": [],  # <|assistant_end|> and <|bos|> end an answer
        },
        # lm-eval's default filter keeps one sample.
        filter_list=[
            {
                "name": "verdicts",
                "filter": [{"function": "take_first_k", "k": samples}, {"function": "custom", "filter_fn": judge}],
            }
        ],
        process_results=results,
        metric_list=[_mean(f"pass@{k}") for k in sizes],
        doc_to_text=lambda document: document[prompt],
        doc_to_target=lambda document: document[reference],
    )


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def pass_at(k: int, passed: Sequence[bool]) -> float:
    """Estimate pass@k without bias from n samples, c of them correct: 1 - C(n - c, k) / C(n, k); any() for k = n."""
    n, c = len(passed), sum(passed)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


_PLACE = "lapcli.evaluation.benchmarks"
BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    {
        "arc_easy": f"{_PLACE}.choices:ARC_EASY",
        "arc_challenge": f"{_PLACE}.choices:ARC_CHALLENGE",
        "mmlu": f"{_PLACE}.choices:MMLU",
        "gsm8k": f"{_PLACE}.numbers:GSM8K",
        "humaneval": f"{_PLACE}.humaneval:HUMANEVAL",
        "spelling": f"{_PLACE}.numbers:SPELLING",
        "bpb": f"{_PLACE}.bits_per_byte:BITS_PER_BYTE",
    },
)

#: The columns of the paper's table, over which it averages.
PAPER_TASKS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")
