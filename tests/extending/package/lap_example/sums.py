"""A data source and a benchmark: sums of two digits, as training text and as questions."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.sources import DocumentSource
from lapcli.evaluation.benchmarks import Benchmark, Document, Documents, letters_definition

QUESTIONS = [(a, b) for a in range(10) for b in range(10)]


class SumsText(DocumentSource):
    name = "sums"

    def fingerprint(self) -> str:
        return "1"  # another one when the text changes

    def rows(self) -> Iterator[str]:
        rng = np.random.default_rng(0)
        for _ in range(500):
            chosen = rng.integers(len(QUESTIONS), size=20)
            yield " ".join(f"{a} + {b} = {a + b};" for a, b in (QUESTIONS[index] for index in chosen))


class SumsBenchmark(Benchmark):
    name = "sums"

    def documents(self, split: str, data: Path | None) -> Documents:
        documents = [{"a": a, "b": b} for a, b in QUESTIONS]
        return Documents(documents, {"sums": hashlib.sha256(json.dumps(documents).encode()).hexdigest()})

    def lm_eval_definition(self) -> dict[str, Any]:
        return letters_definition(self.name, _question, _answers, _right_answer)


def _question(document: Document) -> str:
    return f"{document['a']} + {document['b']} ="


def _answers(document: Document) -> list[Any]:
    return [str(answer) for answer in range(19)]


def _right_answer(document: Document) -> int:
    return document["a"] + document["b"]
