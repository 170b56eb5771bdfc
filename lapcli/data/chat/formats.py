"""Rows of benchmark files as conversations: multiple choice (MMLU, ARC) and GSM8K with its calculator."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lapcli.data.chat.conversation import Malformed, MessagePart, Turn, conversation, question_and_answer

_MARK = re.compile(r"<<(.*?)>>", re.DOTALL)


def multiple_choice_question(question: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    """The label stands after its choice and without a space before it: it is the very token of the answer."""
    lines = [f"- {choice}={label}" for choice, label in zip(choices, labels, strict=True)]
    return "\n".join([f"Multiple choice: {question}", *lines, "", "Answer with the letter of the right choice alone."])


def multiple_choice(row: Any) -> list[Turn]:
    """A row of MMLU or ARC in any of the forms in which they are around."""
    question, choices, labels, answer = read_choices(row)
    return question_and_answer(multiple_choice_question(question, choices, labels), answer)


def read_choices(row: Any) -> tuple[str, list[str], list[str], str]:
    """Question, choices, their labels, and the right one's label; raises Malformed."""
    question, choices, labels, answer = _read_choices(row)
    if len(choices) != len(labels) or not choices:
        raise Malformed(f"there are {len(choices)} choices and {len(labels)} labels")
    if answer not in labels:
        raise Malformed(f"the answer {str(answer)[:20]!r} is not one of the labels {', '.join(labels)[:60]}")
    return question, choices, labels, answer


def gsm8k(row: Any) -> list[Turn]:
    """The question as it is; `<<48/2=24>>` in the answer becomes a call of the calculator and its output."""
    question, answer = (_text(row, key) for key in ("question", "answer"))
    parts: list[MessagePart] = []
    end = 0
    for mark in _MARK.finditer(answer):
        if mark.start() > end:
            parts.append(MessagePart("text", answer[end : mark.start()]))
        expression, sign, result = mark[1].rpartition("=")
        if not sign:
            raise Malformed(f"the calculation {mark[0][:40]!r} has no result")
        parts += [MessagePart("python", expression), MessagePart("python_output", result)]
        end = mark.end()
    if answer[end:]:
        parts.append(MessagePart("text", answer[end:]))
    return question_and_answer(question, *parts)


#: By the `format` of a data set. A row of `conversations` has `messages`, or is the list of them.
READERS: dict[str, Callable[[Any], list[Turn]]] = {
    "conversations": conversation,
    "multiple_choice": multiple_choice,
    "gsm8k": gsm8k,
}


def _read_choices(row: Any) -> tuple[str, list[str], list[str], str]:
    if isinstance(row, Sequence) and not isinstance(row, str):  # a line of MMLU's csv: question, choices, letter
        if len(row) < 4 or not all(isinstance(cell, str) for cell in row):
            raise Malformed("the row is not a question, its choices and a letter")
        choices = list(row[1:-1])
        return row[0], choices, _letters(choices), row[-1]
    if isinstance(row, Mapping) and isinstance(row.get("train"), Mapping):  # the hub's MMLU auxiliary_train
        row = row["train"]
    question = row.get("question") if isinstance(row, Mapping) else None
    if isinstance(question, Mapping):  # AI2's own file of ARC
        pairs = question.get("choices") or []
        if not isinstance(pairs, Sequence):
            raise Malformed("there is no list of choices")
        texts, labels = ([_text(choice, key) for choice in pairs] for key in ("text", "label"))
        return _text(question, "stem"), texts, labels, _text(row, "answerKey")
    given = row.get("choices") if isinstance(row, Mapping) else None
    if isinstance(given, Mapping):  # the hub's ARC
        texts, labels = (_texts(given.get(key)) for key in ("text", "label"))
        return _text(row, "question"), texts, labels, _text(row, "answerKey")
    texts = _texts(given)  # the hub's MMLU
    answer = row.get("answer")
    if not isinstance(answer, int) or not 0 <= answer < len(texts):
        raise Malformed(f"the answer {str(answer)[:20]!r} is not the number of a choice")
    return _text(row, "question"), texts, _letters(texts), _letters(texts)[answer]


def _letters(choices: Sequence[str]) -> list[str]:
    return [chr(ord("A") + number) for number in range(len(choices))]


def _texts(values: Any) -> list[str]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not all(isinstance(value, str) for value in values):
        raise Malformed("there is no list of choices")
    return list(values)


def _text(row: Any, key: str) -> str:
    value = row.get(key) if isinstance(row, Mapping) else None
    if not isinstance(value, str):
        raise Malformed(f"there is no text under {key!r}")
    return value
