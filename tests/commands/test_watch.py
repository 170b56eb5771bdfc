"""`lap runs watch`: the recorded metrics of runs, as curves on a terminal and as lines elsewhere."""

import json
import os
import pty
import sys

import pytest
from support import ROOT, run_main, start_process, tiny_recipe

from lapcli.catalogue import plot_curves, read_watched_run
from lapcli.runs import open_run, unlock


def write_run(folder, name, values, status="finished", **facts):
    run = open_run(folder, name, tiny_recipe(folder / "text.txt"))
    lines = [{"step": step, "loss": value, "lr": 0.1} for step, value in enumerate(values, 1)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.update(status=status, step=len(values), steps=20, **facts)
    unlock(run)
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LAP_RUNS", str(tmp_path))
    write_run(tmp_path, "falls", [float(20 - step) for step in range(20)])
    write_run(tmp_path, "rises", [float(step) for step in range(20)])
    return tmp_path


def test_curves_follow_the_numbers(runs):
    """The letter of a falling loss moves down from left to right, that of a rising loss up."""
    drawn = plot_curves(
        [read_watched_run(runs / "falls", "loss"), read_watched_run(runs / "rises", "loss")], "loss", 60, 16
    ).splitlines()
    assert max(map(len, drawn)) <= 60
    for letter, sign in (("a", 1), ("b", -1)):
        # Inside the frame; where both runs meet, only one letter is visible.
        places = [(x, y) for y, row in enumerate(drawn) if "│" in row for x, c in enumerate(row) if c == letter]
        left, right = min(places), max(places)
        assert right[0] - left[0] > 60 / 2
        assert sign * (right[1] - left[1]) > 5


def test_each_change_is_a_line_without_a_terminal(runs, capsys):
    code, out, _ = run_main(capsys, "runs", "watch", "falls", "rises")
    assert (code, len(out.splitlines())) == (0, 2)
    assert out.splitlines()[0].startswith("falls  step 20/20  loss 1")
    rows = [json.loads(line) for line in run_main(capsys, "runs", "--json", "watch", "*")[1].splitlines()]
    assert {row["run"]: row["loss"] for row in rows} == {"falls": 1.0, "rises": 19.0}


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["falls", "rises"], "a  falls"),
        ([f"many{n}" for n in range(9)], "many8"),  # too many for one picture
    ],
)
def test_the_screen(names, shown, runs):
    for name in names:
        if name.startswith("many"):
            write_run(runs, name, [3.0, 2.0])
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "LINES": "24", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lapcli", "runs", "watch", *names]
    done = start_process(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    while True:
        try:
            if not (part := os.read(ours, 65536)):
                break
        except OSError:  # the other end is closed
            break
        text += part
    assert done.wait() == 0, text.decode()
    lines = text.decode().replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.startswith(shown) for line in lines)
