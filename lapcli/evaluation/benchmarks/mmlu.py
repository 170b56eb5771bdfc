"""MMLU: questions of 57 subjects with four choices (Hendrycks et al., 2021)."""

from collections.abc import Mapping
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
    files_of,
    letters_definition,
    plain_names,
    prompt_form,
)
from lapcli.runtime.errors import DataError

SPLITS = ("test", "dev")


class Mmlu(Benchmark):
    name = "mmlu"
    label = "MMLU"
    help = "questions of 57 subjects"
    lm_eval_splits = SPLITS
    files = BenchmarkFiles(
        "cais/mmlu",
        {split: f"all/{split}-00000-of-00001.parquet" for split in SPLITS},
        ("mmlu", "cais/mmlu"),
        {
            split: (
                f"{split}/*_{split}.csv",
                f"all/{split}-*.parquet",
                f"hf/all/{split}-*.parquet",
                *plain_names(split, "mmlu"),
            )
            for split in SPLITS
        },
    )

    def read_row(self, row: Any, path: Path) -> Document:
        question, texts, labels, answer = read_choices(_with_choices(row))
        subject = row.get("subject") if isinstance(row, Mapping) else None
        if subject is None and path.suffix == ".csv":
            # The authors' files are named SUBJECT_test.csv and have no such column.
            subject = path.stem.rpartition("_")[0]
        return {"question": question, "subject": subject or "", "choices": texts, "answer": labels.index(answer)}

    def definition(self, documents: Documents, form: str = "lap") -> dict[str, Any]:
        def question(document: Document) -> str:
            return choices_prompt(form, document["question"], document["choices"], _labels(document))

        return letters_definition(self.name, documents, question, _labels, _right_label)

    def paper_task(self, request: BenchmarkRequest) -> PreparedTask:
        documents = self.documents("test", request.data)
        return self.own_task(self.definition(documents, prompt_form(request.run)), documents)

    def lm_eval_task(self, request: BenchmarkRequest) -> PreparedTask:
        splits = {split: self.documents(split, request.data) for split in self.lm_eval_splits}
        return PreparedTask(self.name, _subjects_in_groups(splits, request.settings.seed), False, files_of(splits))


def _with_choices(row: Any) -> Any:
    """Bring the row of a csv with a header, which has columns A to D and the answer's letter, into the plain form."""
    if isinstance(row, Mapping) and "choices" not in row and "A" in row:
        return [row.get("question"), *(row[letter] for letter in "ABCD" if letter in row), row.get("answer")]
    return row


def _labels(document: Document) -> list[str]:
    return [chr(65 + number) for number in range(len(document["choices"]))]


def _right_label(document: Document) -> int:
    return int(document["answer"])


def _subjects_in_groups(splits: dict[str, Documents], seed: int) -> dict[str, Any]:
    """Load lm-eval's 57 tasks in four groups; the means of groups and of the whole are weighted by size."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    from lapcli.evaluation.harness.lm_eval_tasks import DEFINITIONS, one_task, read_definition, with_documents

    folder = "mmlu/default"
    top = read_definition(f"{folder}/_mmlu.yaml")
    groups = {name: read_definition(f"{folder}/_{name}.yaml") for name in top["task"]}
    whole = Group.from_config(GroupConfig(**top))
    parts = {name: Group.from_config(GroupConfig(**definition)) for name, definition in groups.items()}
    # A group's file lists a tag, and each subject's file names the tag that it belongs to.
    by_tag = {definition["task"][0]: parts[name] for name, definition in groups.items()}
    by_subject = {split: rows.by("subject") for split, rows in splits.items()}
    tasks: dict[str, Any] = {}
    seen: set[str] = set()
    for path in sorted((DEFINITIONS / folder).glob("mmlu_*.yaml")):
        definition = read_definition(f"{folder}/{path.name}")
        subject = definition["dataset_name"]
        documents = {split: by_subject[split][subject] for split in splits if subject in by_subject[split]}
        # A folder given by --data may have some subjects only.
        if "test" not in documents:
            continue
        tasks |= one_task(definition["task"], with_documents(definition, documents), seed)["tasks"]
        by_tag[definition["tag"]].add(tasks[definition["task"]])
        seen.add(subject)
    unknown = by_subject["test"].keys() - seen
    if unknown:
        raise DataError(f"mmlu: lm-eval has no subject {min(unknown)[:60]!r}; use --protocol paper, or check --data")
    for part in parts.values():
        if len(part):
            whole.add(part)
    used = {whole.name: whole, **{name: part for name, part in parts.items() if len(part)}}
    return {"tasks": tasks, "groups": used, "group_map": {name: group.child_names for name, group in used.items()}}


MMLU = Mmlu()
