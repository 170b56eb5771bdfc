"""Mistakes in all commands: exit code 2, one message that names the key or value, and no files left behind."""

import json
import shlex
import sys

import pytest
from harness_support import make_run
from support import run_main, train_here
from sweep_support import write_recipe

from lapcli.recipe import load_recipe

#: A command line, and the words its message must contain.
MISTAKES = {
    "trian tiny.yaml": "'train'",
    "train": "RECIPE",
    "train dup.yaml": "dup.yaml:2",
    "train quikstart": "quickstart",
    "train chat.yaml": "lap sft chat.yaml",
    "train sweeps/laptop": "lap sweep",
    "train tiny.yaml --set train.step=5": "`steps`",
    "train tiny.yaml --set train.stepz=4 --set modle.layers=3 --set seed=x": "3 errors",
    "train tiny.yaml --set optimizer.lr=0.5": "optimizer.lr",
    "train tiny.yaml --name ../x": "'../x'",
    "train tiny.yaml --nnodes 2": "--rdzv",
    "sft tiny.yaml": "lap train tiny.yaml",
    "sft chat.yaml --run tiny --set stages.sft.train.steps=-1": "stages.sft.train.steps",
    "plan tiny.yaml --gpu rtx4090": "4090",
    "sweep tiny.yaml": "lap train tiny.yaml",
    "sweep tiny.yaml --over sed=1,2": "`seed`",
    "search tiny.yaml": "--over",
    "eval tinny": "tiny",
    "eval --run tiny --tasks bpb --checkpoint 7": "last, best",
    "analyze cosine tiny": "cossim",
    "analyze cossim 'zebra*'": "zebra*",
    "report nowhere": "tiny",
    "runs show tinny": "tiny",
    "runs rename tiny my/run": "my/run",
    "runs rm tiny": "--yes",
    "sample tiny --prompt ''": "--prompt",
    "import model.bin --to x": "model.bin",
    "init tiny.yaml": "tiny.yaml",
    "recipes quikstart": "quickstart",
    "doctor --nproc 99999": "--nproc",
}

CHAT = {
    "objective": "chat",
    "stages": {
        "sft": {
            "mixture": [{"name": "chats", "format": "conversations", "source": "chats.jsonl"}],
            "loss": "assistant",
            "batching": "padded",
            "train": {"steps": 2, "batch": 2, "micro_batch": 2},
        }
    },
}

FILES = {
    "dup.yaml": b"objective: language_model\nseed: 1\nseed: 2\ndata: {train: text.txt}\n",
    "chat.yaml": json.dumps(CHAT).encode(),
    "model.bin": b"\x80\x04",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    write_recipe(folder, train={"steps": 2}, validation={"every": None, "prompts": []})
    train_here(load_recipe(folder / "tiny.yaml"), folder / "runs", "tiny")
    (folder / "emptydir").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("line", "named"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_message(line, named, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    code, out, err = run_main(capsys, *shlex.split(line))
    assert (code, out) == (2, ""), err
    assert named in " ".join(err.split())
    assert "Traceback" not in err
    assert sum(text.startswith(("lap: ", "Error: ")) for text in err.splitlines()) == 1, err
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("stdin", [None, "/dev/null"])
def test_chat_with_closed_stdin(stdin, tmp_path, capsys, monkeypatch):
    """`lap chat <&-`: there is no question, so it exits."""
    make_run(tmp_path)
    monkeypatch.setattr(sys, "stdin", stdin and open(stdin))  # noqa: SIM115
    code, _, err = run_main(capsys, "chat", "--runs-dir", str(tmp_path))
    assert code == 0, err
    assert "Traceback" not in err
