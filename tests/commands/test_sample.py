"""`lap sample`: the same tokens as the engine's own, streamed; several prompts and samples."""

import json

import pytest
import torch
from support import run_main

from lapcli.generation.engine import Engine, Sampling
from lapcli.objectives.weights import find_checkpoint, open_run
from lapcli.runs import read_run


@pytest.fixture(autouse=True)
def runs(chat_runs, monkeypatch):
    monkeypatch.setenv("LAP_RUNS", str(chat_runs[0]))
    return chat_runs[0]


def test_a_base_model_continues_the_text(runs, capsys):
    """The most likely tokens after <|bos|> and the prompt, from the engine itself."""
    run = read_run(runs / "quickstart")
    model, tokenizer = open_run(run, find_checkpoint(run, "last"), torch.device("cpu")).language_model()
    prompt = [tokenizer.bos, *tokenizer.encode("The list type")]
    ((tokens,),) = Engine(model).complete([prompt], Sampling(12))
    code, out, err = run_main(
        capsys, "sample", "--run", "quickstart", "--prompt", "The list type", "--temperature", "0", "--max-tokens", "12"
    )
    assert (code, out) == (0, tokenizer.decode(tokens) + "\n")
    assert run.info["weights_sha256"] in err


def test_a_chat_model_answers(capsys):
    question = ("--prompt", "Spell this word: method", "--temperature", "0", "--max-tokens", "8")
    code, out, _ = run_main(capsys, "sample", *question, "--run", "quickstart-sft")
    assert code == 0
    assert run_main(capsys, "sample", *question)[1] == out  # the newest finished run is that one


def test_samples_depend_only_on_seed_and_index(capsys):
    def samples(*options):
        words = ("sample", "--run", "quickstart", "--prompt", "def", "--max-tokens", "6", "--json", *options)
        return json.loads(run_main(capsys, *words)[1])["samples"]

    four = samples("--samples", "4")
    assert len(set(four)) > 1
    assert samples("--samples", "2") == four[:2]
    assert samples("--samples", "4", "--seed", "1") != four
    text = run_main(capsys, "sample", "--run", "quickstart", "--prompt", "def", "--max-tokens", "6", "--samples", "2")[
        1
    ]
    assert text == "".join(f"{sample}\n---\n" for sample in four[:2])


def test_each_prompt_is_continued(capsys):
    words = ("sample", "--run", "quickstart", "--max-tokens", "4")
    code, out, _ = run_main(capsys, *words, "--prompt", "def", "--prompt", "class A", "--json")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["def", "class A"]
    assert rows[1]["samples"] == [run_main(capsys, *words, "--prompt", "class A")[1][:-1]]
