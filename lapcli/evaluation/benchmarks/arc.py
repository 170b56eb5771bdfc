"""ARC: questions of school science with three to five choices (Clark et al., 2018)."""

from pathlib import Path
from typing import Any

from lapcli.data.chat.formats import read_choices
from lapcli.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkRequest,
    Document,
    Documents,
    PreparedTask,
    choices_prompt,
    letters_definition,
    prompt_form,
)


def _files(name: str) -> BenchmarkFiles:
    """Return the names of the authors' own files, of the hub's, and the obvious ones."""
    snake = name.lower().replace("-", "_")
    local = {}
    for split, official in (("test", "Test"), ("train", "Train"), ("validation", "Dev")):
        local[split] = (
            f"{name}/{name}-{official}.jsonl",
            f"{name}/{split}-*.parquet",
            f"hf/{name}/{split}-*.parquet",
            *(f"{place}.{end}" for place in (f"{name}/{split}", f"{snake}_{split}") for end in ("jsonl", "parquet")),
        )
    hub = {split: f"{name}/{split}-00000-of-00001.parquet" for split in local}
    return BenchmarkFiles("allenai/ai2_arc", hub, ("arc", "ai2_arc", "allenai/ai2_arc"), local)


class Arc(Benchmark):
    def __init__(self, label: str, help_: str) -> None:
        self.name, self.label, self.help = label.lower().replace("-", "_"), label, help_
        self.files = _files(label)
        self.lm_eval_file = f"arc/{self.name}.yaml"

    def read_row(self, row: Any, path: Path) -> Document:
        question, texts, labels, answer = read_choices(row)
        return {"question": question, "choices": {"text": texts, "label": labels}, "answerKey": answer}

    def definition(self, documents: Documents, form: str = "lap") -> dict[str, Any]:
        def question(document: Document) -> str:
            return choices_prompt(form, document["question"], document["choices"]["text"], labels_of(document))

        return letters_definition(self.name, documents, question, labels_of, _right_label)

    def paper_task(self, request: BenchmarkRequest) -> PreparedTask:
        documents = self.documents("test", request.data)
        return self.own_task(self.definition(documents, prompt_form(request.run)), documents)


def labels_of(document: Document) -> list[str]:
    """Return the labels of the row itself: some questions have 1 to 4 instead of letters."""
    return list(document["choices"]["label"])


def _right_label(document: Document) -> int:
    return labels_of(document).index(document["answerKey"])


ARC_EASY = Arc("ARC-Easy", "questions of school science, easy ones")
ARC_CHALLENGE = Arc("ARC-Challenge", "questions of school science, hard ones")
