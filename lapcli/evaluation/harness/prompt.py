"""A prompt that carries its tokens.

lm-eval hands prompts on as text. Rendered chat read back from text would turn a `<|user_end|>` that a question merely
quotes into the real one; so the tokens travel with the text, which is for people. They are made for all prompts of a
task at once, which uses all cores: MMLU has 14,042.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lapcli.data.chat.conversation import Malformed, Turn, conversation
from lapcli.data.chat.rendering import render_prompts
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.runtime.errors import DataError


class Prompt(str):
    """Text with its token ids, through copying and pickling."""

    _ids: tuple[int, ...] | None
    _parts: "tuple[Sequence[Turn], str, Tokenizer] | None"

    def __new__(cls, text: str, ids: Sequence[int] | None, parts: Any = None) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt._ids = None if ids is None else tuple(ids)
        prompt._parts = parts
        return prompt

    @property
    def ids(self) -> tuple[int, ...]:
        if self._ids is None:
            encode_prompts([self])
        assert self._ids is not None
        return self._ids

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompt, (str(self), self.ids)


def encode_prompts(prompts: Iterable[Prompt]) -> None:
    """Gives ids to all that have none yet, in one call of the tokenizer."""
    waiting = [(prompt, prompt._parts) for prompt in {id(each): each for each in prompts}.values()]
    parts = [(prompt, *given) for prompt, given in waiting if given is not None]
    if not parts:
        return
    tokenizer = parts[0][3]
    begun = tokenizer.encode_batch([text for _, _, text, _ in parts])
    rendered = render_prompts([turns for _, turns, _, _ in parts], tokenizer)
    for (prompt, *_), ids, more in zip(parts, rendered, begun, strict=True):
        prompt._ids, prompt._parts = (*ids, *more), None


def chat_prompt(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, answer_begins: bool = False) -> Prompt:
    """Messages up to the token after which the assistant answers; `answer_begins`: the last one is its beginning."""
    begun = messages[-1]["content"] if answer_begins else ""
    try:
        turns = conversation(messages[:-1] if answer_begins else messages)
    except Malformed as error:
        raise DataError(f"a prompt cannot be rendered as a conversation: {error}") from None
    if not turns or turns[-1].role != "user":
        raise DataError("a prompt cannot be rendered as a conversation: it does not end with the user")
    said = "".join(f"<|{turn.role}_start|>{turn.parts[0].text}<|{turn.role}_end|>" for turn in turns)
    text = f"<|bos|>{said}<|assistant_start|>{begun}"  # as decoding the tokens would give
    return Prompt(text, None, (turns, begun, tokenizer))
