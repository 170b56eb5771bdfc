"""A prompt that carries its tokens.

lm-eval hands prompts on as text. Rendered chat read back from text would turn a `<|user_end|>` that a question merely
quotes into the real one; so the tokens travel with the text, which is for people.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lapcli.data.chat.conversation import Malformed, conversation
from lapcli.data.chat.rendering import render_prompt
from lapcli.data.tokenizer import Tokenizer
from lapcli.errors import DataError


class Prompt(str):
    """Text with its token ids, through copying and pickling."""

    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Sequence[int]) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt.ids = tuple(ids)
        return prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompt, (str(self), self.ids)


def chat_prompt(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, answer_begins: bool = False) -> Prompt:
    """Messages up to the token after which the assistant answers; `answer_begins`: the last one is its beginning."""
    begun = messages[-1]["content"] if answer_begins else ""
    try:
        turns = conversation(messages[:-1] if answer_begins else messages)
    except Malformed as error:
        raise DataError(f"a prompt cannot be rendered as a conversation: {error}") from None
    if not turns or turns[-1].role != "user":
        raise DataError("a prompt cannot be rendered as a conversation: it does not end with the user")
    ids = [*render_prompt(turns, tokenizer), *tokenizer.encode(begun)]
    return Prompt(tokenizer.decode(ids), ids)
