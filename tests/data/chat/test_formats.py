"""Benchmark rows as conversations, on hand-made rows and on the real files."""

import re

import pytest

from lapcli.data.chat.conversation import READERS, Malformed, gsm8k, multiple_choice, render_batch
from lapcli.data.files import read_rows
from lapcli.data.text.tokenizer import train_tokenizer

HUB_ARC = {
    "question": "Which is warm?",
    "choices": {"text": ["ice", "fire"], "label": ["1", "2"]},
    "answerKey": "2",
}
MMLU = {"question": "Which is warm?", "choices": ["ice", "fire"], "answer": 1}


def texts(turns):
    return [(turn.role, [(part.kind, part.text) for part in turn.parts]) for turn in turns]


def test_gsm8k_by_hand():
    row = {"question": "How much?", "answer": "She has 48/2 = <<48/2=24>>24.\nCost <<24*2=48>>48.\n#### 48"}
    assert texts(gsm8k(row)) == [
        ("user", [("text", "How much?")]),
        (
            "assistant",
            [
                ("text", "She has 48/2 = "),
                ("python", "48/2"),
                ("python_output", "24"),
                ("text", "24.\nCost "),
                ("python", "24*2"),
                ("python_output", "48"),
                ("text", "48.\n#### 48"),
            ],
        ),
    ]


def test_multiple_choice_as_on_the_hub():
    (_, [(_, question)]), (_, [(_, answer)]) = texts(multiple_choice(HUB_ARC))
    assert "- ice=1\n- fire=2\n\n" in question
    assert question.startswith("Multiple choice: Which is warm?\n")
    assert answer == "2"
    mmlu = texts(multiple_choice(MMLU))
    assert mmlu == texts(multiple_choice({"train": MMLU}))
    assert mmlu[1] == ("assistant", [("text", "B")])


@pytest.mark.parametrize(
    "row",
    [
        None,
        {**MMLU, "answer": 2},
        {**MMLU, "answer": -1},
        {**HUB_ARC, "answerKey": "C"},
        {**HUB_ARC, "choices": {"text": ["a"], "label": ["A", "B"]}},
    ],
)
def test_malformed_choices(row):
    with pytest.raises(Malformed):
        multiple_choice(row)


def read_back(ids, tokenizer):
    """The question and the answer with its <<a=b>> marks, recovered from the tokens alone."""
    text = tokenizer.decode_bytes(ids).decode()
    found = re.fullmatch(
        r"<\|bos\|><\|user_start\|>(.*)<\|user_end\|><\|assistant_start\|>(.*)<\|assistant_end\|>", text, re.DOTALL
    )
    call = r"<\|python_start\|>(.*?)<\|python_end\|><\|output_start\|>(.*?)<\|output_end\|>"
    return found[1], re.sub(call, r"<<\1=\2>>", found[2])


def test_real_gsm8k_rendered_and_read_back(test_data):
    tokenizer = train_tokenizer(["the cost of each apple"], 265, max_chars=100, crop=100)
    rows = list(read_rows(test_data / "gsm8k" / "test.jsonl"))
    assert len(rows) == 1319
    calls = 0
    for row, rendered in zip(rows, render_batch([gsm8k(row) for row in rows], tokenizer), strict=True):
        assert read_back(rendered.ids, tokenizer) == (row["question"], row["answer"])
        calls += row["answer"].count("<<")
        # Calculator output is not a target, but everything that the assistant writes is.
        learned = tokenizer.decode_bytes(rendered.ids[rendered.is_target]).decode()
        without = re.sub(r"<<(.*?)=([^=<>]*)>>", r"<|python_start|>\1<|python_end|>", row["answer"])
        assert learned == without + "<|assistant_end|>"
    assert calls > 3 * len(rows)


SAID = [
    ("system", "Be brief."),
    ("user", "Two?\n\n1 + 1"),
    ("assistant", "2"),
    ("user", "Sure?"),
    ("assistant", "Yes."),
]
MESSAGES = [{"role": role, "content": text} for role, text in SAID]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text} for role, text in SAID
]  # fmt: skip
FORMS = {
    "list": MESSAGES,
    "openai": {"messages": MESSAGES},
    "sharegpt": {"id": "x", "conversations": SHAREGPT},
    "sharegpt_system": {"system": "Be brief.", "conversations": SHAREGPT[1:]},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_common_chat_formats_give_the_same_conversation(row):
    turns = READERS["conversations"](row)
    said = [(turn.role, "".join(part.text for part in turn.parts)) for turn in turns]
    assert said == [("user", "Be brief.\n\nTwo?\n\n1 + 1"), *SAID[2:]]


def test_alpaca():
    turns = READERS["conversations"]({"instruction": "Two?", "input": "1 + 1", "output": "2"})
    assert texts(turns) == [("user", [("text", "Two?\n\n1 + 1")]), ("assistant", [("text", "2")])]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, "messages: field required"),
        ({"conversations": [{"from": "gpt", "value": "hi"}]}, "message 1 has the role 'assistant', expected user"),
        ({"instruction": "a"}, "output: field required"),
        (7, "messages: input should be a valid list"),
    ],
)
def test_unknown_formats_name_the_missing_keys(row, reason):
    with pytest.raises(Malformed, match=reason):
        READERS["conversations"](row)
