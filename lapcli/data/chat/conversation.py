"""Validates conversations and renders them to tokens with a mask of the assistant's targets.

Turns of user and assistant alternate, the user first. A user's turn is text. An assistant's is text, or parts: `text`,
`python` (a call of the calculator) and `python_output` (its result). A leading system message is prepended to the
first user turn.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from lapcli.data.text.tokenizer import Tokenizer

MessagePartKind = Literal["text", "python", "python_output"]


class Malformed(Exception):
    """A conversation that cannot be rendered; the message gives the reason."""


@dataclass(frozen=True)
class MessagePart:
    kind: MessagePartKind
    text: str


@dataclass(frozen=True)
class Turn:
    role: Literal["user", "assistant"]
    parts: tuple[MessagePart, ...]


def conversation(messages: Any) -> list[Turn]:
    """Return the turns of a list of {role, content} messages; raise Malformed if they are invalid."""
    if isinstance(messages, Mapping):
        messages = messages.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Malformed("there is no list of messages")
    messages = _with_system_merged([_role_and_content(message) for message in messages])
    if not messages:
        raise Malformed("the conversation is empty")
    turns: list[Turn] = []
    for number, (role, content) in enumerate(messages):
        expected: Literal["user", "assistant"] = "assistant" if number % 2 else "user"
        if role != expected:
            raise Malformed(f"message {number + 1} has the role {str(role)[:30]!r}, expected {expected}")
        turns.append(Turn(expected, _parts(content, expected, number + 1)))
    return turns


def question_and_answer(question: str, *answer: MessagePart | str) -> list[Turn]:
    """Build a conversation of one user turn and one assistant turn."""
    parts = tuple(MessagePart("text", part) if isinstance(part, str) else part for part in answer)
    return [Turn("user", (MessagePart("text", question),)), Turn("assistant", parts)]


def refuse_empty_turns(turns: Sequence[Turn]) -> None:
    """Raise Malformed for a turn without text, which would only teach the model to be silent."""
    for number, turn in enumerate(turns, start=1):
        if not any(part.text.strip() for part in turn.parts):
            raise Malformed(f"turn {number} ({turn.role}) is empty")


def _role_and_content(message: Any) -> tuple[Any, Any]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise Malformed("a message has no role or no content")
    return message["role"], message["content"]


def _with_system_merged(messages: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Prepend a system message to the first user message, with a blank line between."""
    if not messages or messages[0][0] != "system":
        return messages
    if len(messages) < 2 or messages[1][0] != "user":
        raise Malformed("there is no user message after the system message")
    system, user = messages[0][1], messages[1][1]
    if not isinstance(system, str) or not isinstance(user, str) or not user.strip():
        raise Malformed("the content of a system or user message is not text, or empty")
    return [("user", f"{system}\n\n{user}"), *messages[2:]]


def _parts(content: Any, role: str, number: int) -> tuple[MessagePart, ...]:
    if isinstance(content, str):
        return (MessagePart("text", content),)
    if role == "user" or not isinstance(content, Sequence):
        raise Malformed(f"the content of message {number} is not text")
    parts = []
    for part in content:
        kind: Any = part.get("type") if isinstance(part, Mapping) else None
        if kind not in get_args(MessagePartKind):
            raise Malformed(f"message {number} has a part of type {str(kind)[:30]!r}")
        if not isinstance(text := part.get("text"), str):
            raise Malformed(f"message {number} has a part without text")
        parts.append(MessagePart(kind, text))
    return tuple(parts)


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
            # Of the output nothing is learned: when sampling, the engine inserts it.
            learned = is_assistant and part.kind != "python_output"
            start, end = _AROUND.get(part.kind, (None, None))
            yield from [(start, False, learned)] if start else []
            yield part.text, True, learned
            yield from [(end, False, learned)] if end else []
        # The assistant learns its own end, after which sampling stops; a user's end is only context.
        yield f"<|{turn.role}_end|>", False, is_assistant
