"""A conversation, checked: turns of user and assistant in strict alternation, the user first.

A user's turn is text. An assistant's is text, or parts: `text`, `python` (a call of the calculator) and `python_output`
(what it answered). A system message in front becomes the beginning of the first user turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

PartKind = Literal["text", "python", "python_output"]


class Malformed(Exception):
    """A conversation that cannot be rendered; its text says why."""


@dataclass(frozen=True)
class Part:
    kind: PartKind
    text: str


@dataclass(frozen=True)
class Turn:
    role: Literal["user", "assistant"]
    parts: tuple[Part, ...]


def conversation(messages: Any) -> list[Turn]:
    """The turns of a list of {role, content} messages; raises Malformed."""
    if isinstance(messages, Mapping):
        messages = messages.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Malformed("no list of messages")
    messages = _with_system_merged([_role_and_content(message) for message in messages])
    if not messages:
        raise Malformed("empty")
    turns: list[Turn] = []
    for number, (role, content) in enumerate(messages):
        expected: Literal["user", "assistant"] = "assistant" if number % 2 else "user"
        if role != expected:
            raise Malformed(f"message {number + 1} is of {str(role)[:30]!r}, expected {expected}")
        turns.append(Turn(expected, _parts(content, expected, number + 1)))
    return turns


def question_and_answer(question: str, *answer: Part | str) -> list[Turn]:
    """A conversation of one user turn and one assistant turn."""
    parts = tuple(Part("text", part) if isinstance(part, str) else part for part in answer)
    return [Turn("user", (Part("text", question),)), Turn("assistant", parts)]


def refuse_empty_turns(turns: Sequence[Turn]) -> None:
    """Raises Malformed: nothing can be learned from a turn without text, but to say nothing."""
    for number, turn in enumerate(turns, start=1):
        if not any(part.text.strip() for part in turn.parts):
            raise Malformed(f"turn {number}, of the {turn.role}, is empty")


def _role_and_content(message: Any) -> tuple[Any, Any]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise Malformed("a message without role and content")
    return message["role"], message["content"]


def _with_system_merged(messages: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """System text, a blank line, then the first user's own text."""
    if not messages or messages[0][0] != "system":
        return messages
    system = messages[0][1]
    if len(messages) < 2 or messages[1][0] != "user":
        raise Malformed("no user message after the system message")
    user = messages[1][1]
    if not isinstance(system, str) or not isinstance(user, str):
        raise Malformed("the content of a system or user message is not text")
    if not user.strip():
        raise Malformed("the user's message after the system message is empty")
    return [("user", f"{system}\n\n{user}"), *messages[2:]]


def _parts(content: Any, role: str, number: int) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Part("text", content),)
    if role == "user" or not isinstance(content, Sequence):
        raise Malformed(f"the content of message {number} is not text")
    parts = []
    for part in content:
        kind: Any = part.get("type") if isinstance(part, Mapping) else None
        if kind not in get_args(PartKind):
            raise Malformed(f"message {number} has a part of type {str(kind)[:30]!r}")
        if not isinstance(text := part.get("text"), str):
            raise Malformed(f"message {number} has a part without text")
        parts.append(Part(kind, text))
    return tuple(parts)
