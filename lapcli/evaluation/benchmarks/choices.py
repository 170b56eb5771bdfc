"""ARC (Clark et al., 2018) and MMLU (Hendrycks et al., 2021): multiple choice by the choices' labels."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lapcli.data.chat.conversation import Malformed, multiple_choice_question, read_choices
from lapcli.evaluation.benchmarks import (
    Benchmark,
    Document,
    Documents,
    PreparedTask,
    files_of,
    letters_definition,
)
from lapcli.runs import Run
from lapcli.runtime.errors import DataError

if TYPE_CHECKING:
    from lapcli.evaluation.tasks import Request


class Choices(Benchmark):
    """Documents have the fields of lm-eval's tasks."""

    def parts(self, document: Document) -> tuple[list[str], list[str], int]:
        """Return the choices, their labels, and the index of the correct one."""
        raise NotImplementedError

    def definition(self, form: str = "lap") -> dict[str, Any]:
        """Return the paper's task. `form`: the question wording that the run was fine-tuned with."""

        def question(document: Document) -> str:
            choices, labels, _ = self.parts(document)
            return choices_prompt(form, document["question"], choices, labels)

        return letters_definition(
            self.name, question, lambda document: self.parts(document)[1], lambda document: self.parts(document)[2]
        )

    def paper_task(self, request: "Request") -> PreparedTask:
        documents = self.documents("test", request.data)
        return self.prepared(self.definition(prompt_form(request.run)), {"test": documents}, request, is_chat=True)


def prompt_form(run: Run) -> str:
    """Return the question wording of a chat run's fine-tuning: nanochat's for imported runs, else ours."""
    return str(run.info.get("prompt_form", "lap"))


def choices_prompt(form: str, question: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    """Word a multiple-choice question as in fine-tuning."""
    if form != "nanochat":
        return multiple_choice_question(question, choices, labels)
    lines = [f"- {choice}={label}" for choice, label in zip(choices, labels, strict=True)]
    instruction = "Respond only with the letter of the correct answer."
    return "\n".join([f"Multiple Choice question: {question}", *lines, "", instruction])


class Arc(Choices):
    repository, folder = "allenai/ai2_arc", "arc"

    def __init__(self, config: str) -> None:
        self.name, self.config = config.lower().replace("-", "_"), config
        self.lm_eval_file = f"arc/{self.name}.yaml"

    def read_row(self, row: Any) -> Document:
        question, texts, labels, answer = read_choices(row)
        return {"question": question, "choices": {"text": texts, "label": labels}, "answerKey": answer}

    def parts(self, document: Document) -> tuple[list[str], list[str], int]:
        labels = list(document["choices"]["label"])  # the row's own: some questions have 1 to 4 instead of letters
        return document["choices"]["text"], labels, labels.index(document["answerKey"])


class Mmlu(Choices):
    name = folder = "mmlu"
    repository, config = "cais/mmlu", "all"
    lm_eval_splits = ("test", "dev")

    def read_row(self, row: Any) -> Document:
        question, texts, labels, answer = read_choices(row)
        if not isinstance(row, Mapping) or not isinstance(row.get("subject"), str):
            raise Malformed("no text under 'subject'")
        return {"question": question, "subject": row["subject"], "choices": texts, "answer": labels.index(answer)}

    def parts(self, document: Document) -> tuple[list[str], list[str], int]:
        choices = document["choices"]
        return choices, [chr(65 + number) for number in range(len(choices))], document["answer"]

    def lm_eval_task(self, request: "Request") -> PreparedTask:
        """Load lm-eval's 57 tasks as one group, whose mean is weighted by size."""
        from lm_eval.api.group import Group
        from lm_eval.config.group import GroupConfig

        from lapcli.evaluation.language_tasks import DEFINITIONS, read_definition, task_over

        splits = {split: self.documents(split, request.data) for split in self.lm_eval_splits}
        by_subject: dict[str, dict[str, Documents]] = {}
        for split, documents in splits.items():
            for document in documents:
                of_subject = by_subject.setdefault(document["subject"], {})
                of_subject.setdefault(split, Documents([], {})).append(document)
        group = Group.from_config(GroupConfig(**read_definition("mmlu/default/_mmlu.yaml")))
        tasks: dict[str, Any] = {}
        for path in sorted((DEFINITIONS / "mmlu" / "default").glob("mmlu_*.yaml")):
            definition = read_definition(f"mmlu/default/{path.name}")
            of_subject = by_subject.pop(definition["dataset_name"], {})
            if "test" in of_subject:  # a folder given by --data may have some subjects only
                tasks[definition["task"]] = task_over(definition, of_subject, request.seed)
                group.add(tasks[definition["task"]])
        if unknown := [subject for subject, of_subject in by_subject.items() if "test" in of_subject]:
            raise DataError(
                f"mmlu: lm-eval has no subject {min(unknown)[:60]!r}; use --protocol paper, or check --data"
            )
        loaded = {"tasks": tasks, "groups": {group.name: group}, "group_map": {group.name: group.child_names}}
        return PreparedTask(self.name, loaded, files=files_of(splits))


ARC_EASY, ARC_CHALLENGE, MMLU = Arc("ARC-Easy"), Arc("ARC-Challenge"), Mmlu()
