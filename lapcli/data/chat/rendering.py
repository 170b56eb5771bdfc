"""Conversations as tokens, with the mask of those that an assistant is to learn.

    <|bos|>                                          0
    <|user_start|> text <|user_end|>                 0 0 0
    <|assistant_start|>                              0
    text of the assistant                            1
    <|python_start|> expression <|python_end|>       1 1 1
    <|output_start|> result <|output_end|>           0 0 0
    <|assistant_end|>                                1

The mask marks targets: the loss at position t counts if token t + 1 is marked. Each part is tokenised by itself, and
nothing stands between the parts and the special tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lapcli.data.chat.conversation import Part, Turn
from lapcli.data.text.tokenizer import Tokenizer

_AROUND = {
    "python": ("<|python_start|>", "<|python_end|>", True),
    "python_output": ("<|output_start|>", "<|output_end|>", False),
}


class Rendered(NamedTuple):
    ids: np.ndarray  # int64
    is_target: np.ndarray  # bool, as long


class _Piece(NamedTuple):
    special: str | None  # its name, or
    text: str
    is_target: bool


def render(turns: Sequence[Turn], tokenizer: Tokenizer) -> Rendered:
    return render_batch([turns], tokenizer)[0]


def render_batch(conversations: Sequence[Sequence[Turn]], tokenizer: Tokenizer) -> list[Rendered]:
    """All texts are tokenised in one call, which uses all cores."""
    pieces = [list(_pieces(turns)) for turns in conversations]
    texts = iter(tokenizer.encode_batch([piece.text for row in pieces for piece in row if piece.special is None]))
    rendered = []
    for row in pieces:
        ids: list[int] = []
        is_target: list[bool] = []
        for piece in row:
            added = next(texts) if piece.special is None else [tokenizer.special(piece.special)]
            ids += added
            is_target += [piece.is_target] * len(added)
        rendered.append(Rendered(np.array(ids, dtype=np.int64), np.array(is_target, dtype=bool)))
    return rendered


def render_prompt(turns: Sequence[Turn], tokenizer: Tokenizer) -> list[int]:
    """A conversation that ends with the user, and the token after which the assistant answers."""
    return render_prompts([turns], tokenizer)[0]


def render_prompts(conversations: Sequence[Sequence[Turn]], tokenizer: Tokenizer) -> list[list[int]]:
    if not all(turns and turns[-1].role == "user" for turns in conversations):
        raise ValueError("a prompt ends with a turn of the user")
    start = tokenizer.special("<|assistant_start|>")
    return [[*rendered.ids.tolist(), start] for rendered in render_batch(conversations, tokenizer)]


def _pieces(turns: Sequence[Turn]) -> Iterator[_Piece]:
    yield _Piece("<|bos|>", "", False)
    for turn in turns:
        learned = turn.role == "assistant"
        yield _Piece(f"<|{turn.role}_start|>", "", False)
        for part in turn.parts:
            yield from _part(part, learned)
        yield _Piece(f"<|{turn.role}_end|>", "", learned)


def _part(part: Part, learned: bool) -> Iterator[_Piece]:
    if part.kind == "text":
        yield _Piece(None, part.text, learned)
        return
    start, end, is_target = _AROUND[part.kind]
    yield _Piece(start, "", is_target)
    yield _Piece(None, part.text, is_target)
    yield _Piece(end, "", is_target)
