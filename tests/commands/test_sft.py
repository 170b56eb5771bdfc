"""`lap train`, `lap sft`, `lap chat`: the quickstart pair as a user runs it, cut to a few steps."""

import json

from support import CHAT_CUT as CUT
from support import ROOT, lap, run_main

RECIPE = "recipes/chat_quickstart.yaml"


def info(runs, name):
    return json.loads((runs / name / "run.json").read_text())


def test_the_stages_are_runs(chat_runs):
    runs, result = chat_runs
    pretrained, midtrain, sft = (info(runs, name) for name in ("quickstart", "quickstart-midtrain", "quickstart-sft"))
    assert midtrain["objective"] == sft["objective"] == "chat"
    assert midtrain["status"] == sft["status"] == "finished"
    starts = [stage["recipe"]["train"]["init_from"] for stage in (midtrain, sft)]
    assert [start["source"] for start in starts] == ["run:quickstart", "run:quickstart-midtrain"]
    assert [start["sha256"] for start in starts] == [run["weights_sha256"] for run in (pretrained, midtrain)]
    assert f"weights sha256 {pretrained['weights_sha256'][:16]}" in result.stderr
    assert "questions " in result.stderr
    assert f"lap chat quickstart-sft --runs-dir {runs}" in result.stdout
    assert "[Spell this word: method]" in result.stdout


def test_a_second_start_skips_finished_stages(chat_runs, capsys):
    runs, _ = chat_runs
    code, out, err = run_main(capsys, "sft", str(ROOT / RECIPE), *CUT, "--runs-dir", str(runs))
    assert code == 0, err
    assert out.count(" is finished: ") == 2
    code, _, err = run_main(capsys, "sft", str(ROOT / RECIPE), "--runs-dir", str(runs))
    assert code == 2
    assert "train.steps" in err


def test_chat_reads_questions(chat_runs, shared_cache):
    runs, _ = chat_runs
    asked = "hello\n/clear\nSpell this word: dog\n/quit\nnever read\n"
    result = lap("chat", "--runs-dir", str(runs), "--max-tokens", "5", asked=asked)
    assert result.returncode == 0, result.stderr
    assert "(forgotten)" in result.stderr
    weights = info(runs, "quickstart-sft")["weights_sha256"]
    assert f"quickstart-sft, weights sha256 {weights[:16]}" in result.stderr


def test_counts_are_printed_before_training(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out, _ = run_main(capsys, "sft", "recipes/chat561m.yaml", "--dry-run")
    assert code == 0
    for number in (
        "460,341",
        "99,842",
        "7,473",
        "2 x 1,000",
        "200,000",
        "80,000",
        "849,656",
        "22,443",
        "steps: 700",
    ):
        assert number in out


def test_fetch_names_every_data_set(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out, err = run_main(capsys, "fetch", RECIPE)
    assert code == 0, err
    assert "questions" in out
    assert "spelling bee" in out
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = run_main(capsys, "fetch", "recipes/chat561m.yaml")
    assert code == 2
    assert "smol-smoltalk" in err
