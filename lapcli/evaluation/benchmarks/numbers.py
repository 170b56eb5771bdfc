"""Questions answered by a number after `####`: GSM8K (Cobbe et al., 2021), word problems; and `spelling`, which asks
how often a letter occurs in a word, and whose questions are generated."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.data.chat.conversation import Malformed
from lapcli.data.chat.generated import builtin_words, spelling_bee
from lapcli.data.text.builtin import builtin_text
from lapcli.evaluation.benchmarks import (
    Benchmark,
    Document,
    Documents,
    PreparedTask,
    sampled_definition,
    texts_of,
)
from lapcli.evaluation.tasks import Sampling, Settings
from lapcli.recipe.schema import CHAT, LANGUAGE
from lapcli.runtime.files import sha256_of_file

if TYPE_CHECKING:
    from lapcli.evaluation.tasks import Request

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")  # as nanochat: neither `####42` nor `#### $42`, and `#### 42.` is not 42
SPELLING_DOCUMENTS = 256


def final_number(text: str) -> str | None:
    """Return the number after the first `####`, without commas; numbers are compared as strings."""
    match = _NUMBER.search(text)
    return match and match[1].replace(",", "")


def compare_numbers(answers: Sequence[Sequence[str]], documents: Sequence[Document]) -> list[list[Any]]:
    numbers = [[final_number(answer) for answer in samples] for samples in answers]
    return [
        [{"passed": number is not None and number == document["number"], "number": number} for number in each]
        for each, document in zip(numbers, documents, strict=True)
    ]


class Gsm8k(Benchmark):
    """Documents have `question`, `answer` and `number`."""

    name = folder = "gsm8k"
    repository, config = "openai/gsm8k", "main"
    official = ("{split}.jsonl",)
    lm_eval_file = "gsm8k/gsm8k.yaml"
    lm_eval_splits = ("test", "train")
    is_sampled = True

    def read_row(self, row: Any) -> Document:
        document = texts_of(row, "question", "answer")
        number = final_number(document["answer"])
        if number is None:
            raise Malformed("no `#### number` in its answer")
        return {**document, "number": number}

    def paper_task(self, request: "Request") -> PreparedTask:
        sampling, splits = request.settings.sampling, {"test": self.documents("test", request.data)}
        definition = sampled_definition(self.name, sampling, compare_numbers, "question", "answer")
        return self.prepared(definition, splits, request, is_chat=True, sampling=sampling)


class Spelling(Gsm8k):
    name = folder = "spelling"
    needs = frozenset({LANGUAGE, CHAT})

    def documents(self, split: str, data: Path | None) -> Documents:
        """Generate rows that are not in the training set, from the words of the built-in text."""
        words = builtin_words()
        documents = []
        for number in range(SPELLING_DOCUMENTS):
            question, answer = spelling_bee(words, number, split)
            last = answer.parts[-1].text
            documents.append({"question": question.parts[0].text, "answer": last, "number": final_number(last)})
        digest = hashlib.sha256(json.dumps(documents).encode()).hexdigest()
        return Documents(documents, {f"generated from builtin text {sha256_of_file(builtin_text())[:16]}": digest})

    def lm_eval_task(self, request: "Request") -> PreparedTask:
        """Sample only the greedy answer; lm-eval itself has no such task."""
        greedy = Settings(sampling=Sampling(samples=1, temperature=0.0))
        return self.paper_task(replace(request, settings=greedy))


GSM8K, SPELLING = Gsm8k(), Spelling()
