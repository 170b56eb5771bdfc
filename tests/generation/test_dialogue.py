"""Transcripts and conversations at the terminal."""

import io

import pytest
import torch

from lapcli.data.text.tokenizer import train_tokenizer
from lapcli.generation.dialogue import Dialogue, Transcript, converse, transcript
from lapcli.generation.engine import Sampling
from lapcli.models.gpt import GPT, GPTConfig


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte: every non-ASCII character is several tokens."""
    return train_tokenizer(["a"], 265, max_chars=10, crop=10)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, heads=2, width=16, vocab=265, context=64, laplacian_heads=1))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
        model.head.weight[256:] -= 5  # says bytes, so that answers are as long as they may be
    return model


def special(tokenizer, name):
    return tokenizer.special(f"<|{name}|>")


def test_no_piece_splits_a_character(tokenizer):
    text = "a é 漢字 🙂 👩‍💻 z"
    shown = Transcript(tokenizer)
    pieces = [shown.add(token) for token in tokenizer.encode(text)]
    assert "".join([*pieces, shown.end()]) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[2:4] == ["", "é"]
    assert transcript([0xC3, special(tokenizer, "python_start"), ord("1")], tokenizer) == "\ufffd[calculator: 1"


def test_the_prompt_contains_the_dialogue(model, tokenizer, monkeypatch):
    dialogue = Dialogue(model, tokenizer, Sampling(4, 1.0))
    prompts = []
    stream = dialogue._engine.stream
    monkeypatch.setattr(
        dialogue._engine, "stream", lambda given, sampling: prompts.append(given[0]) or stream(given, sampling)
    )
    answers = ["".join(dialogue.answer(question)) for question in ("hi", "you")]
    asked = [[special(tokenizer, "user_start"), *tokenizer.encode(q), special(tokenizer, "user_end"),
              special(tokenizer, "assistant_start")] for q in ("hi", "you")]  # fmt: skip
    assert prompts[0] == [tokenizer.bos, *asked[0]]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert prompts[1][-len(asked[1]) :] == asked[1]
    said = prompts[1][len(prompts[0]) : -len(asked[1])]
    assert said[-1] == special(tokenizer, "assistant_end")
    assert transcript(said[:-1], tokenizer) == answers[0]
    dialogue.clear()
    list(dialogue.answer("hi"))
    assert prompts[2] == prompts[0]


def typed(*lines):
    waiting = iter(lines)

    def read(prompt):
        line = next(waiting, EOFError)
        if isinstance(line, type):
            raise line
        return line

    return read


def test_dialogue_commands(model, tokenizer, capsys):
    dialogue = Dialogue(model, tokenizer, Sampling(4, 0.0))
    converse(dialogue, typed("hi", "", "/clear", "hi", "/quit", "never"))
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()[:1], captured.out.splitlines()[-1:]
    assert len(dialogue._exchanges) == 1  # the one after /clear
    assert "forgotten" in captured.err
    assert first
    assert second
    converse(dialogue, typed("/help"))  # not a question
    assert "/clear" in capsys.readouterr().err
    converse(dialogue, typed(KeyboardInterrupt, "hi"))  # at the prompt it only says how to leave
    assert "/quit" in capsys.readouterr().err
    assert len(dialogue._exchanges) == 2


def test_ctrl_c_stops_the_answer_not_the_program(model, tokenizer, monkeypatch):
    dialogue = Dialogue(model, tokenizer, Sampling(30, 1.0))

    class Terminal(io.StringIO):
        presses = 0

        def write(self, text):
            Terminal.presses += 1
            if Terminal.presses == 4:
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    converse(dialogue, typed("hi", "and you?"))
    assert " ..." in terminal.getvalue()
    assert len(dialogue._exchanges) == 2  # the one that was stopped, as far as it went, and the next
    assert len(dialogue._exchanges[0]) < len(dialogue._exchanges[1])
