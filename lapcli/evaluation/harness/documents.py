"""Rows of benchmark files as documents in the hub's form, whatever form the file has; every row is checked."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lapcli.data.chat.conversation import Malformed
from lapcli.data.chat.sources import read_rows
from lapcli.data.chat.spelling import spelling_bee
from lapcli.data.chat.tasks import read_choices
from lapcli.data.chat.words import builtin_words
from lapcli.data.text.builtin import builtin_sha256, builtin_text
from lapcli.evaluation.harness.answers import final_number
from lapcli.evaluation.harness.files import benchmark_files
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file

Document = dict[str, Any]

SPELLING_DOCUMENTS = 256


class Documents(list[Document]):
    """As much of a data set as lm-eval looks at; `files`: where they came from, with sha256."""

    def __init__(self, documents: Sequence[Document], files: Mapping[str, str]) -> None:
        super().__init__(documents)
        self.files = dict(files)

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0])

    def by(self, key: str) -> "dict[str, Documents]":
        """The documents of each value of a key, in their order."""
        found: dict[str, Documents] = {}
        for document in self:
            found.setdefault(document[key], Documents([], self.files)).append(document)
        return found


def load_documents(task: str, split: str, data: Path | None) -> Documents:
    """Of one of the benchmarks; a row that cannot be read is named."""
    read = READERS[task]
    paths = benchmark_files(task, split, data)
    documents: list[Document] = []
    for path in paths:
        for number, row in enumerate(_rows(path), start=1):
            try:
                documents.append(read(row, path))
            except Malformed as error:
                raise DataError(
                    f"{task}: {path} row {number} is not one of {task} ({error}); mend it or check --data"
                ) from None
    if not documents:
        raise DataError(f"{task}: {paths[0]} has no rows; get it again, or check --data")
    return Documents(documents, {str(path): sha256_of_file(path) for path in paths})


def spelling_documents() -> Documents:
    """SpellingBee's test rows over the words of the built-in text."""
    words = builtin_words()
    documents = []
    for number in range(SPELLING_DOCUMENTS):
        question, answer = spelling_bee(words, number, "test")
        last = answer.parts[-1].text
        documents.append({"question": question.parts[0].text, "answer": last, "number": final_number(last)})
    digest = hashlib.sha256(json.dumps(documents).encode()).hexdigest()
    return Documents(documents, {f"generated from builtin text {builtin_sha256(builtin_text())[:16]}": digest})


def _rows(path: Path) -> Iterator[Any]:
    """A csv with a header gives dictionaries; one without (MMLU's own) lists of cells."""
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


def _arc(row: Any, _: Path) -> Document:
    question, texts, labels, answer = read_choices(row)
    return {"question": question, "choices": {"text": texts, "label": labels}, "answerKey": answer}


def _mmlu(row: Any, path: Path) -> Document:
    question, texts, labels, answer = read_choices(_with_choices(row))
    subject = row.get("subject") if isinstance(row, Mapping) else None
    if subject is None and path.suffix == ".csv":
        subject = path.stem.rpartition("_")[0]
    return {"question": question, "subject": subject or "", "choices": texts, "answer": labels.index(answer)}


def _with_choices(row: Any) -> Any:
    """A csv with a header: columns A to D, the answer's letter."""
    if isinstance(row, Mapping) and "choices" not in row and "A" in row:
        return [row.get("question"), *(row[letter] for letter in "ABCD" if letter in row), row.get("answer")]
    return row


def _gsm8k(row: Any, _: Path) -> Document:
    document = _texts(row, "question", "answer")
    number = final_number(document["answer"])
    if number is None:
        raise Malformed("no `#### number` in its answer")
    return {**document, "number": number}


def _humaneval(row: Any, _: Path) -> Document:
    return _texts(row, "task_id", "prompt", "canonical_solution", "test", "entry_point")


def _texts(row: Any, *names: str) -> Document:
    for name in names:
        if not isinstance(row, Mapping) or not isinstance(row.get(name), str):
            raise Malformed(f"no text under {name!r}")
    return {name: row[name] for name in names}


READERS: dict[str, Callable[[Any, Path], Document]] = {
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "mmlu": _mmlu,
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
}
