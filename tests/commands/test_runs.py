"""`lap runs`: each subcommand on real runs, as text and JSON, and its one-sentence errors."""

import json
import os
import pty
import shutil
import subprocess
import sys

import pytest
from support import ROOT, run_main, start_process


@pytest.fixture
def runs(chat_runs, tmp_path, monkeypatch):
    shutil.copytree(chat_runs[0], tmp_path / "runs")
    monkeypatch.setenv("LAP_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def kept(chat_runs, monkeypatch):
    """For commands that only read."""
    monkeypatch.setenv("LAP_RUNS", str(chat_runs[0]))
    return chat_runs[0]


@pytest.mark.parametrize("columns", [60, 120])
def test_the_list_fits_the_terminal(columns, kept, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run_main(capsys, "runs")
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    for word in ("quickstart-midtrain", "quickstart-sft", "language_model", "40/40", "finished", "bits_per_byte"):
        assert word in out


def test_list_and_show_as_json(kept, capsys):
    listed = json.loads(run_main(capsys, "runs", "--json", "list", "quick*")[1])
    assert {run["name"]: run["objective"] for run in listed} == {
        "quickstart": "language_model",
        "quickstart-midtrain": "chat",
        "quickstart-sft": "chat",
    }
    told = json.loads(run_main(capsys, "runs", "--json", "show", "quickstart-sft")[1])
    info = json.loads((kept / "quickstart-sft" / "run.json").read_text())
    assert told["info"]["weights_sha256"] == info["weights_sha256"]
    assert told["started_from"][0] == "quickstart-midtrain"
    assert told["checkpoints"] == ["step-000003"]
    code, text, _ = run_main(capsys, "runs", "show", "quickstart-sft")
    assert (code, info["weights_sha256"] in text) == (0, True)


def test_diff_names_the_keys_that_differ(kept, capsys):
    code, out, _ = run_main(capsys, "runs", "--json", "diff", "quickstart-midtrain", "quickstart-sft")
    assert code == 0
    told = json.loads(out)
    keys = {row["key"]: (row["a"], row["b"]) for row in told["recipe"]}
    assert keys["train.batch"] == (4, 8)
    assert "train.steps" not in keys  # 3 in both
    summary = json.loads((kept / "quickstart-sft" / "summary.json").read_text())
    scores = {row["key"]: row["b"] for row in told["results"]}
    assert scores["validation loss"] == summary["end"]["validation_loss"]
    code, out, _ = run_main(capsys, "runs", "diff", "quickstart", "quickstart")
    assert (code, "recipe: the same" in out, "versions: the same" in out) == (0, True, True)


def test_rename_rm_and_prune(runs, capsys):
    assert run_main(capsys, "runs", "rename", "quickstart-sft", "talker") == (0, f"{runs / 'talker'}\n", "")
    code, out, err = run_main(capsys, "runs", "prune")  # asks
    assert (code, "step-000020" in out, "midtrain" in out, "--yes" in err) == (2, True, False, True)
    assert (runs / "quickstart/checkpoints/step-000020").is_dir()
    code, out, _ = run_main(capsys, "runs", "prune", "--yes")
    assert (code, "step-000020" in out, "freed" in out) == (0, True, True)
    assert [path.name for path in (runs / "quickstart/checkpoints").iterdir()] == ["step-000040"]
    code, out, _ = run_main(capsys, "runs", "rm", "talker", "--yes")
    assert (code, str(runs / "talker") in out) == (0, True)
    assert not (runs / "talker").exists()


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_rm_asks_at_a_terminal(answer, code, runs):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lapcli", "runs", "rm", "quickstart"]
    started = start_process(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.write(ours, f"{answer}\n".encode())
    _, err = started.communicate()
    os.close(ours)
    os.close(theirs)
    assert started.returncode == code
    assert f"Remove {runs / 'quickstart'}" in err
    assert "quickstart-midtrain started from quickstart." in err
    assert (runs / "quickstart").exists() == (code != 0)
