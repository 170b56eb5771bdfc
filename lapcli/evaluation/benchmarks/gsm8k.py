"""GSM8K: word problems of school mathematics, answered by a number after `####` (Cobbe et al., 2021)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lapcli.data.chat.conversation import Malformed
from lapcli.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkRequest,
    BenchmarkSettings,
    Document,
    Documents,
    PreparedTask,
    plain_names,
    sampled_definition,
    texts_of,
)

SPLITS = ("test", "train")
_NUMBER = re.compile(r"#### (-?[0-9.,]+)")  # as nanochat: neither `####42` nor `#### $42`, and `#### 42.` is not 42


class NumberBenchmark(Benchmark):
    """Questions whose answer ends with `#### number`; the documents have `question`, `answer` and `number`."""

    def definition(self, documents: Documents, settings: BenchmarkSettings) -> dict[str, Any]:
        return sampled_definition(self.name, documents, settings, _compare_numbers, _question, _answer)

    def paper_task(self, request: BenchmarkRequest) -> PreparedTask:
        documents, settings = self.documents("test", request.data), request.settings
        return self.own_task(self.definition(documents, settings), documents, sampling=settings.to_dict())


class Gsm8k(NumberBenchmark):
    name = "gsm8k"
    label = "GSM8K"
    help = "word problems of school mathematics"
    lm_eval_file = "gsm8k/gsm8k.yaml"
    lm_eval_splits = SPLITS
    files = BenchmarkFiles(
        "openai/gsm8k",
        {split: f"main/{split}-00000-of-00001.parquet" for split in SPLITS},
        ("gsm8k", "openai/gsm8k"),
        {split: (*plain_names(split, "gsm8k"), f"main/{split}-*.parquet") for split in SPLITS},
    )

    def read_row(self, row: Any, path: Path) -> Document:
        document = texts_of(row, "question", "answer")
        number = final_number(document["answer"])
        if number is None:
            raise Malformed("no `#### number` in its answer")
        return {**document, "number": number}


def final_number(text: str) -> str | None:
    """Return the number after the first `####`, without commas; numbers are compared as texts."""
    match = _NUMBER.search(text)
    return match and match[1].replace(",", "")


def _compare_numbers(answers: Sequence[Sequence[str]], documents: Sequence[Document]) -> list[list[Any]]:
    numbers = [[final_number(answer) for answer in samples] for samples in answers]
    return [
        [{"passed": number is not None and number == document["number"], "number": number} for number in each]
        for each, document in zip(numbers, documents, strict=True)
    ]


def _question(document: Document) -> str:
    return str(document["question"])


def _answer(document: Document) -> str:
    return str(document["answer"])


GSM8K = Gsm8k()
