"""The tasks as in the paper's table: chat prompts, option letters for ARC and MMLU, pass@k for the others.

Each is a task definition of lm-eval; its documents are read here, so that neither the hub's library nor lm-eval's index
of thousands of tasks is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lapcli.data.chat.tasks import multiple_choice_question
from lapcli.evaluation.harness.answers import final_number, pass_at, python_program
from lapcli.evaluation.harness.documents import Document, Documents
from lapcli.evaluation.harness.settings import Settings

LETTERS_VERSION = 1  # of prompts and scoring
GENERATED_VERSION = 2  # 2: more ways to write a number or a program are read, and the calculator knows //


def labels_of(document: Document) -> list[str]:
    """ARC's rows have labels of their own, some of them 1 to 4; MMLU's are A to D."""
    choices = document["choices"]
    return list(choices["label"]) if isinstance(choices, dict) else [chr(65 + n) for n in range(len(choices))]


def _question(document: Document) -> str:
    choices = document["choices"]
    texts = choices["text"] if isinstance(choices, dict) else choices
    return multiple_choice_question(document["question"], texts, labels_of(document))


def _right_label(document: Document) -> int:
    if "answerKey" in document:
        return labels_of(document).index(document["answerKey"])
    return int(document["answer"])


def letters_task(name: str, documents: Documents) -> dict[str, Any]:
    return {
        **_task(name, documents, LETTERS_VERSION),
        "output_type": "multiple_choice",
        "doc_to_text": _question,
        "doc_to_choice": labels_of,
        "doc_to_target": _right_label,
        "metric_list": [_mean("acc")],
    }


def number_task(name: str, documents: Documents, settings: Settings) -> dict[str, Any]:
    """GSM8K and spelling: right if the number after `####` is the reference's."""

    def judge(answers: Sequence[Sequence[str]], documents: Sequence[Document]) -> list[list[Any]]:
        found = [[final_number(answer) for answer in given] for given in answers]
        return [
            [{"passed": number is not None and number == document["number"], "number": number} for number in numbers]
            for numbers, document in zip(found, documents, strict=True)
        ]

    return {
        **_generated(name, documents, settings, judge),
        "doc_to_text": _asked,
        "doc_to_target": _reference,
    }


def code_task(name: str, documents: Documents, settings: Settings, judge: Callable[..., Any]) -> dict[str, Any]:
    return {
        **_generated(name, documents, settings, judge),
        "doc_to_text": _prompt,
        "doc_to_target": _solution,
    }


def program_of(document: Document, answer: str) -> str:
    return python_program(document["prompt"], answer)


def pass_metrics(samples: int) -> list[int]:
    return sorted({1, samples})


def _generated(name: str, documents: Documents, settings: Settings, judge: Callable[..., Any]) -> dict[str, Any]:
    def results(document: Document, verdicts: Sequence[Sequence[Any]]) -> dict[str, float]:
        passed = [verdict["passed"] for verdict in verdicts[0]]
        return {f"pass@{k}": pass_at(k, passed) for k in pass_metrics(settings.samples)}

    return {
        **_task(name, documents, GENERATED_VERSION),
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
        "metric_list": [_mean(f"pass@{k}") for k in pass_metrics(settings.samples)],
    }


def _task(name: str, documents: Documents, version: int) -> dict[str, Any]:
    def load(**_: Any) -> dict[str, Documents]:
        return {"test": documents}

    return {
        "task": name,
        "custom_dataset": load,
        "test_split": "test",
        "num_fewshot": 0,
        "metadata": {"version": version},
    }


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _asked(document: Document) -> str:
    return str(document["question"])


def _reference(document: Document) -> str:
    return str(document["answer"])


def _prompt(document: Document) -> str:
    return str(document["prompt"])


def _solution(document: Document) -> str:
    return str(document["canonical_solution"])
