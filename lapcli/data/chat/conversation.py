"""Conversations: parsing and checking data set rows, and rendering them to tokens with marked targets.

Rows may be chats in the common forms, multiple choice (MMLU, ARC), or GSM8K with its calculator:

    OpenAI     {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or the list
    ShareGPT   {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    Alpaca     {"instruction": "...", "input": "...", "output": "..."}

Turns of user and assistant alternate, the user first. A leading system message is prepended to the first user turn. An
assistant's turn may have parts: `text`, `python` (a call of the calculator) and `python_output` (its result).

    <|bos|>                                          0
    <|user_start|> text <|user_end|>                 0 0 0
    <|assistant_start|>                              0
    text of the assistant                            1
    <|python_start|> expression <|python_end|>       1 1 1
    <|output_start|> result <|output_end|>           0 0 0
    <|assistant_end|>                                1

The mask marks targets: the loss at position t counts if token t + 1 is marked. Each part is tokenised separately,
with nothing between the parts and the special tokens.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from lapcli.data.text.tokenizer import Tokenizer

_MARK = re.compile(r"<<(.*?)=([^=]*?)>>", re.DOTALL)
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
#: For the error message about rows of unknown format.
EXPECTED_FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} (OpenAI), '
    '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]} (ShareGPT) or '
    '{"instruction": "...", "output": "..."} (Alpaca)'
)


class Malformed(Exception):
    """A conversation that cannot be rendered; the message gives the reason."""


@dataclass(frozen=True)
class MessagePart:
    kind: Literal["text", "python", "python_output"]
    text: str


@dataclass(frozen=True)
class Turn:
    role: Literal["user", "assistant"]
    parts: tuple[MessagePart, ...]


class _Message(BaseModel):
    role: Annotated[str, Field(validation_alias=AliasChoices("role", "from"))]
    content: Annotated[str, Field(validation_alias=AliasChoices("content", "value"))]


class _Chat(BaseModel):
    messages: Annotated[list[_Message], Field(validation_alias=AliasChoices("messages", "conversations"))]
    system: str | None = None


class _Instruction(BaseModel):
    instruction: str
    input: str | None = None
    output: str


class _Choices(BaseModel):  # of ARC on the hub
    text: list[str]
    label: list[str]


class _Question(BaseModel):
    question: str
    choices: _Choices | list[str]
    answer: int | None = None  # of MMLU
    answerKey: str | None = None


class _Problem(BaseModel):  # of GSM8K
    question: str
    answer: str


R = TypeVar("R", bound=BaseModel)


def _checked(form: type[R], row: Any) -> R:
    try:
        return form.model_validate(row, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise Malformed(f"{'.'.join(map(str, first['loc'])) or 'row'}: {first['msg'].lower()}") from None


def chat(row: Any) -> list[Turn]:
    """Parse a row in any of the three forms; raise Malformed if it is in none."""
    if isinstance(row, Mapping) and "instruction" in row:
        pair = _checked(_Instruction, row)
        return question_and_answer("\n\n".join(filter(None, (pair.instruction, pair.input))), pair.output)
    return conversation(row)


def conversation(row: Any) -> list[Turn]:
    """Return the turns of a list of messages, or of a row that has one; raise Malformed if they are invalid."""
    given = _checked(_Chat, row if isinstance(row, Mapping) else {"messages": row})
    messages = [(_ROLES.get(message.role, message.role), message.content) for message in given.messages]
    messages = [("system", given.system), *messages] if given.system else messages
    if [role for role, _ in messages[:2]] == ["system", "user"]:
        messages = [("user", f"{messages[0][1]}\n\n{messages[1][1]}"), *messages[2:]]
    if not messages:
        raise Malformed("the conversation is empty")
    turns: list[Turn] = []
    for number, (role, content) in enumerate(messages):
        expected: Literal["user", "assistant"] = "assistant" if number % 2 else "user"
        if role != expected:
            raise Malformed(f"message {number + 1} has the role {role[:30]!r}, expected {expected}")
        turns.append(Turn(expected, (MessagePart("text", content),)))
    return turns


def question_and_answer(question: str, *answer: MessagePart | str) -> list[Turn]:
    """Build a conversation of one user turn and one assistant turn."""
    parts = tuple(MessagePart("text", part) if isinstance(part, str) else part for part in answer)
    return [Turn("user", (MessagePart("text", question),)), Turn("assistant", parts)]


def multiple_choice_question(question: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    """Format a question; no space before the label, so that it is the same token as in the answer."""
    lines = [f"- {choice}={label}" for choice, label in zip(choices, labels, strict=True)]
    return "\n".join([f"Multiple choice: {question}", *lines, "", "Answer with the letter of the right choice alone."])


def multiple_choice(row: Any) -> list[Turn]:
    """Parse a row of MMLU or ARC as on the hub."""
    question, choices, labels, answer = read_choices(row)
    return question_and_answer(multiple_choice_question(question, choices, labels), answer)


def read_choices(row: Any) -> tuple[str, list[str], list[str], str]:
    """Return question, choices, their labels and the answer's label; raise Malformed if inconsistent."""
    if isinstance(row, Mapping) and isinstance(row.get("train"), Mapping):  # MMLU's auxiliary_train
        row = row["train"]
    given = _checked(_Question, row)
    if isinstance(given.choices, _Choices):  # ARC's labels are its own: letters or digits, three to five of them
        choices, labels, answer = given.choices.text, given.choices.label, str(given.answerKey)
    else:
        choices, labels = given.choices, [chr(ord("A") + number) for number in range(len(given.choices))]
        answer = chr(ord("A") + (-1 if given.answer is None else given.answer))
    if len(choices) != len(labels) or answer not in labels:
        raise Malformed(f"the answer {answer[:20]!r} is not one of the labels {', '.join(labels)[:60]}")
    return given.question, choices, labels, answer


def gsm8k(row: Any) -> list[Turn]:
    """Parse a row of GSM8K; `<<48/2=24>>` in the answer becomes a call of the calculator and its output."""
    problem = _checked(_Problem, row)
    # Text, expression and result in turn, since the pattern has two groups.
    kinds: tuple[Any, ...] = ("text", "python", "python_output")
    pieces = enumerate(_MARK.split(problem.answer))
    parts = [MessagePart(kinds[number % 3], text) for number, text in pieces if text or number % 3]
    return question_and_answer(problem.question, *parts)


#: Parsers by the `format` of a data set.
READERS: dict[str, Callable[[Any], list[Turn]]] = {
    "conversations": chat,
    "multiple_choice": multiple_choice,
    "gsm8k": gsm8k,
}


_AROUND = {
    "python": ("<|python_start|>", "<|python_end|>"),
    "python_output": ("<|output_start|>", "<|output_end|>"),
}


class Rendered(NamedTuple):
    ids: np.ndarray  # int64
    is_target: np.ndarray  # bool, of the same length


def render(turns: Sequence[Turn], tokenizer: Tokenizer) -> Rendered:
    return render_batch([turns], tokenizer)[0]


def render_batch(conversations: Sequence[Sequence[Turn]], tokenizer: Tokenizer) -> list[Rendered]:
    """Render conversations; one call tokenises all texts on all cores."""
    pieces = [list(_pieces(turns)) for turns in conversations]
    texts = iter(tokenizer.encode_batch(piece for row in pieces for piece, is_text, _ in row if is_text))
    rendered = []
    for row in pieces:
        ids: list[int] = []
        is_target: list[bool] = []
        for piece, is_text, learned in row:
            added = next(texts) if is_text else [tokenizer.special(piece)]
            ids += added
            is_target += [learned] * len(added)
        rendered.append(Rendered(np.array(ids, dtype=np.int64), np.array(is_target, dtype=bool)))
    return rendered


def render_prompt(turns: Sequence[Turn], tokenizer: Tokenizer) -> list[int]:
    """Render a conversation that ends with the user, and the token after which the assistant answers."""
    if not turns or turns[-1].role != "user":
        raise ValueError("a prompt must end with a user turn")
    return [*render(turns, tokenizer).ids.tolist(), tokenizer.special("<|assistant_start|>")]


def _pieces(turns: Sequence[Turn]) -> Iterator[tuple[str, bool, bool]]:
    """Yield texts and special token names; whether each is text; whether it is a training target."""
    yield "<|bos|>", False, False
    for turn in turns:
        is_assistant = turn.role == "assistant"
        yield f"<|{turn.role}_start|>", False, False
        for part in turn.parts:
            # The output is not a target: when sampling, the engine inserts it.
            learned = is_assistant and part.kind != "python_output"
            start, end = _AROUND.get(part.kind, (None, None))
            yield from [(start, False, learned)] if start else []
            yield part.text, True, learned
            yield from [(end, False, learned)] if end else []
        # The assistant's end token is a target, after which sampling stops; a user's end is only context.
        yield f"<|{turn.role}_end|>", False, is_assistant
