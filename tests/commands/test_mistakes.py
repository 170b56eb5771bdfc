"""Mistakes across all commands: exit code 2, one message that names the key or value in question, nothing left over."""

import errno
import json
import os
import shlex
import subprocess
import sys

import pytest
from harness_support import make_run
from support import HANG, ROOT, run_main, run_process, train_here
from sweep_support import write_recipe

from lapcli.recipe import load_recipe
from lapcli.runtime.errors import from_os_error

#: A line, and what its message must name.
MISTAKES = {
    "trian tiny.yaml": "'train'",
    "train": "RECIPE",
    "train tiny.yaml --steps 5": "--set",
    "train tiny.yaml extra.yaml": "extra.yaml",
    "train empty.yaml": "`objective:`",
    "train dup.yaml": "dup.yaml:2",
    "train tabs.yaml": "tabs.yaml:3",
    "train badobj.yaml": "`language_model`, `chat`, `classification` or `self_supervised`",
    "train loop.yaml": "loop.yaml -> loop.yaml",
    "train ext.yaml": "nothere.yaml",
    "train notes.docx": "notes.docx:1",
    "train tiny": "tiny.yaml",
    "train quikstart": "quickstart",
    "train runs/tiny": "runs/tiny/recipe.yaml",
    "train chat.yaml": "lap sft chat.yaml",
    "train sweeps/laptop": "lap sweep",
    "train ladders/gpt_cpu": "lap ladder",
    "train tiny.yaml --set train.steps": "key.path=value",
    "train tiny.yaml --set train.step=5": "`steps`",
    "train tiny.yaml --set train.steps=ten": '"ten"',
    "train tiny.yaml --set model.laplacian_heads=5": "0 to 4",
    "train tiny.yaml --set 'model.operators={laplacain: 2}'": "laplacian",
    "train tiny.yaml --set train.device=cuda --name c": "train.device=cpu",
    "train tiny.yaml --set train.stepz=4 --set modle.layers=3 --set seed=x": "3 errors",
    "train tiny.yaml --set optimizer.lr=0.5": "optimizer.lr",
    "train tiny.yaml --name ../x": "'../x'",
    "train tiny.yaml --name b --data nowhere.txt": "nowhere.txt",
    "train tiny.yaml --name b --data rows.jsonl": "data.column",
    "train tiny.yaml --name b --init-from run:tinny": "tiny",
    "train tiny.yaml --nproc two": "--nproc",
    "train tiny.yaml --nnodes 2": "--rdzv",
    "sft tiny.yaml": "lap train tiny.yaml",
    "sft chat.yaml --run tiny --set stages.sft.train.steps=-1": "stages.sft.train.steps",
    "plan tiny.yaml --gpu rtx4090": "4090",
    "sweep tiny.yaml": "lap train tiny.yaml",
    "sweep tiny.yaml --over sed=1,2": "`seed`",
    "sweep tiny.yaml --over model.laplacian_heads=0,9": "0 to 4",
    'sweep tiny.yaml --over seed=1,2 --then "eval --tasks topp1"': "bpb",
    "search tiny.yaml": "--over",
    "eval tinny": "tiny",
    "eval tiny --run tiny": "--run",
    "eval tiny --tasks top1": "bpb",
    "eval --run tiny --tasks bpb --checkpoint 7": "last, best",
    "eval tiny --tasks bpb --set knn.k=3": "--set",
    "analyze cosine tiny": "cossim",
    "analyze cossim tinny": "tiny",
    "analyze cossim 'zebra*'": "zebra*",
    "report nowhere": "tiny",
    "report --columns bits": "validation_loss",
    "report --format html --out emptydir": "emptydir",
    "runs show tinny": "tiny",
    "runs rename tiny my/run": "my/run",
    "runs rm tiny": "--yes",
    "runs watch tiny --metric los": "loss",
    "sample tiny --prompt ''": "--prompt",
    "chat tiny": "lap sft",
    "export tiny --to timm": "safetensors",
    "import model.bin --to x": "model.bin",
    "fetch tiny.yaml --data nowhere": "nowhere",
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
    "empty.yaml": b"",
    "tabs.yaml": b"objective: language_model\nmodel:\n\tlayers: 2\n",
    "dup.yaml": b"objective: language_model\nseed: 1\nseed: 2\ndata: {train: text.txt}\n",
    "badobj.yaml": b"objective: gpt\n",
    "loop.yaml": b"extends: loop.yaml\n",
    "ext.yaml": b"extends: nothere.yaml\n",
    "chat.yaml": json.dumps(CHAT).encode(),
    "rows.jsonl": b'{"content": "a"}\n' * 5,
    "notes.docx": b"PK\x03\x04" + bytes(100),
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


def test_a_closed_standard_input_is_one_on_which_nothing_is_asked(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run_main(capsys, "runs", "rm", "tiny")
    assert code == 2
    assert "--yes" in err


@pytest.mark.parametrize("stdin", [None, "/dev/null"])
def test_chat_without_anybody_who_asks(stdin, tmp_path, capsys, monkeypatch):
    """`lap chat <&-`: nothing is asked, and it ends."""
    make_run(tmp_path)
    monkeypatch.setattr(sys, "stdin", stdin and open(stdin))  # noqa: SIM115
    code, _, err = run_main(capsys, "chat", "--runs-dir", str(tmp_path))
    assert code == 0, err
    assert "Traceback" not in err


def test_chat_into_a_full_disk(tmp_path):
    make_run(tmp_path)
    asked = ["chat", "--prompt", "what?", "--max-tokens", "4", "--runs-dir", str(tmp_path)]
    words = [sys.executable, "-m", "lapcli", *asked]
    with open("/dev/full", "w") as full:
        ended = run_process(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=HANG)
    assert ended.returncode == 1
    assert "lap: the output cannot be written (No space left on device); make room" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_an_output_that_is_full_is_one_sentence():
    """`lap runs > /dev/full`: the error of the system names no file."""
    said = str(from_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert said.startswith("the output cannot be written (No space left on device); make room")
