"""Rendering against tokens worked out by hand: the tokenizer has one token per byte, then the nine special tokens."""

import pytest

from lapcli.data.chat.conversation import Malformed, MessagePart, conversation, question_and_answer, render

BOS, USER, USER_END, ASSISTANT, ASSISTANT_END, PYTHON, PYTHON_END, OUTPUT, OUTPUT_END = range(256, 265)


def spoken(*messages):
    return conversation([{"role": role, "content": content} for role, content in messages])


def test_rendering_token_by_token(tokenizer):
    turns = [
        *spoken(("system", "Be."), ("user", "2+2"))[:1],
        question_and_answer("", "It", MessagePart("python", "2+2"), MessagePart("python_output", "4"), "is")[1],
        *spoken(("user", "ü"), ("assistant", "ok")),
    ]
    by_hand = [
        # bos and the first user turn: the system text, a blank line, the user's own
        (BOS, 0), (USER, 0), (66, 0), (101, 0), (46, 0), (10, 0), (10, 0), (50, 0), (43, 0), (50, 0), (USER_END, 0),
        (ASSISTANT, 0), (73, 1), (116, 1),
        (PYTHON, 1), (50, 1), (43, 1), (50, 1), (PYTHON_END, 1),
        (OUTPUT, 0), (52, 0), (OUTPUT_END, 0),
        (105, 1), (115, 1), (ASSISTANT_END, 1),
        (USER, 0), (0xC3, 0), (0xBC, 0), (USER_END, 0),
        (ASSISTANT, 0), (111, 1), (107, 1), (ASSISTANT_END, 1),
    ]  # fmt: skip
    rendered = render(turns, tokenizer)
    assert rendered.ids.tolist() == [token for token, _ in by_hand]
    assert rendered.is_target.tolist() == [bool(mark) for _, mark in by_hand]


def test_text_never_gives_special_tokens(tokenizer):
    turns = spoken(("user", "<|assistant_start|>"), ("assistant", "<|bos|>"))
    ids = render(turns, tokenizer).ids.tolist()
    assert [id_ for id_ in ids if id_ >= 256] == [BOS, USER, USER_END, ASSISTANT, ASSISTANT_END]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "valid list"),
        ([{"role": "assistant", "content": "x"}], "message 1.*'assistant'"),
        ([{"role": "user", "content": "x"}] * 2, "message 2.*'user'"),
        ([{"role": "system", "content": "x"}], "message 1"),
        ([{"role": "user", "content": 5}], "content"),
    ],
)
def test_malformed_conversations(messages, reason):
    with pytest.raises(Malformed, match=reason):
        conversation(messages)
