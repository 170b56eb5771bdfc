"""Mistakes that can be found without torch are reported before its import, which takes seconds."""

import json
import os
import subprocess
import sys

import pytest
from support import ROOT
from sweep_support import write_recipe

from lapcli.recipe import load_recipe

#: Runs commands in sequence and prints the message of each and whether torch is loaded.
CODE = """
import contextlib, io, json, sys
import lapcli.cli as cli

def end(code):
    raise SystemExit(int(code))

cli.end_process = end
for words in json.loads(sys.argv[1]):
    sys.argv, err = ["lap", *words], io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        cli.main()
    print(json.dumps([err.getvalue(), "torch" in sys.modules]), flush=True)
"""

MISTAKES = [
    ("train quickstart --data nowhere", "nowhere"),
    ("train vit_digits --data nowhere", "nowhere"),
    ("train vit_digits --set data.validation=nowhere", "data.validation"),
    ("train quickstart --init-from run:tinny", "tiny"),
    ("train quickstart --init-from nowhere", "nowhere"),
    ("train gpt_continue --set train.init_from.source=tiny", "run:tiny"),
    (
        "sft chat_quickstart --run tiny --set stages.sft.mixture=[{name: a, format: gsm8k, source: nowhere}]",
        "nowhere",
    ),
    ("sft chat_quickstart --run tinny", "tiny"),
    ("fetch quickstart --data nowhere", "nowhere"),
    ("init birds --job images --data nowhere", "nowhere"),
    ("eval tiny --data nowhere", "nowhere"),
    ("eval tiny --tasks top1", "top1"),
    ("eval tiny --protocol paper", "--protocol"),
    ("analyze spectrum tiny --data nowhere", "nowhere"),
    ("analyze features tiny", "features"),
    ("export tiny --to hg", "--to"),
    ("export tiny --to timm", "timm"),
    ("report --format docx", "docx"),
    ("report --columns validation_los", "validation_loss"),
    ("chat tiny", "lap sft"),
    ("runs watch tiny --metric los", "loss"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    from support import train_here

    folder = tmp_path_factory.mktemp("home")
    train_here(load_recipe(write_recipe(folder, train={"steps": 2})), folder / "runs", "tiny")
    return folder


def test_mistakes(home):
    """All in one process: the output line shows which command first loads torch."""
    commands = []
    for words, _ in MISTAKES:
        first, *changes = words.split(" --set ")
        commands.append([*first.split(), *(word for change in changes for word in ("--set", change))])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "500"}
    called = [sys.executable, "-c", CODE, json.dumps(commands)]
    done = subprocess.run(called, capture_output=True, text=True, cwd=home, env=environment, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(told) == len(MISTAKES)
    for (words, named), (message, has_torch) in zip(MISTAKES, told, strict=True):
        assert named in message.strip().splitlines()[-1], words
        assert not has_torch, words
