"""The base install: features that need another package name the extra to install in one sentence."""

import os
import subprocess
import sys

import pytest
from support import ROOT, run_main

EXTRAS = {"lm_eval": "eval", "optuna": "search", "plotext": "watch", "transformers": "hf", "tensorboard": "tensorboard"}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("lm_eval", ["eval", "quickstart", "--tasks", "arc_easy"]),
        ("optuna", ["search", "quickstart", "--over", "optimizer.lr={from: 0.01, to: 0.1}"]),
        ("transformers", ["export", "quickstart", "--to", "hf", "--verify"]),
        ("tensorboard", ["train", "quickstart", "--set", "track=[tensorboard]"]),
    ],
)
def test_a_missing_extra_is_one_sentence_with_the_command(module, words, quickstart, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("LAP_RUNS", str(quickstart[0].parent))
    code, _, err = run_main(capsys, *words)
    assert code == 2
    assert f"pip install 'lapcli[{EXTRAS[module]}]'" in " ".join(err.split())


@pytest.mark.long
def test_the_base_install_trains_evaluates_analyzes_plans_and_reports(tmp_path):
    hidden = "".join(f"sys.modules['{module}'] = None; " for module in EXTRAS)
    short = "train.steps=2 --set schedule.warmup_epochs=0"
    for words in (
        f"train vit_digits --set {short}",
        "eval vit_digits --tasks top1",
        "analyze spectrum vit_digits --limit 32",
        "plan gpt561m --gpu l40",
        "report --format html",
        "train quickstart --set train.steps=2 --set validation.tokens=2048",
    ):
        program = f"import sys; {hidden}sys.argv[1:] = {words.split()!r}; from lapcli.cli import main; main()"
        command = [sys.executable, "-c", program]
        environment = {**os.environ, "LAP_RUNS": str(tmp_path / "runs")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
