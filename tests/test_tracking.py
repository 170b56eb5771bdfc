"""Runs in the real trackers, read back from their own files: every step once, and no tracker can stop a run."""

import json
import signal
import socket
import threading
from importlib.util import find_spec

import pytest
import yaml
from support import TINY, lap, run_main, start_lap, tiny_recipe, write_text
from tracking_support import tensorboard_scalars, wandb_scalars

from lapcli import tracking
from lapcli.recipe import load_recipe, recipe_hash
from lapcli.runs import open_run, read_run, unlock
from lapcli.runtime.errors import LapError
from lapcli.runtime.files import write_json
from lapcli.tracking import LiveTracking, replay
from lapcli.training.metrics import MetricsLog, read_metrics

STEPS = 40


def lines_until(last):
    for step in range(last + 1):
        if step:
            yield {"step": step, "loss": 1 / step, "lr": 0.1, "seconds": 0.5}
        if step % 3 == 0:
            yield {"step": step, "validation_loss": 2.0 - step / 10}


@pytest.fixture
def run(tmp_path):
    """A run that was interrupted after nine steps, with a validation at the start and every three steps."""
    run = open_run(tmp_path / "runs", "mine", tiny_recipe(tmp_path / "text.txt"))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines_until(9)))
    run.update(status="interrupted", step=9, steps=20)
    unlock(run)
    return run


def check_once(held, lines):
    lines = list(lines)
    for tag, name in (("train/loss", "loss"), ("validation/loss", "validation_loss")):
        expected = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert sorted(held[tag]) == expected


def test_a_replayed_run_appears_once(run, monkeypatch):
    (run.path / "eval").mkdir()
    write_json(run.path / "eval" / "top1.json", {"tasks": {"top1": {"value": 0.5}}, "step": 6})
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    assert [replay(run, "tensorboard") for _ in range(2)] == [10, 10]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert replay(run, "wandb") == 10
    for held in (tensorboard_scalars(run.path), wandb_scalars(run.path)):
        check_once(held, lines_until(9))
        assert held["eval/top1"] == [(6, 0.5)]
        assert len(held["time/seconds"]) == 9
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed; pip install 'lapcli[trackio]'")
def test_trackio(run, tmp_path, monkeypatch):
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    replay(run, "trackio")
    store = sqlite3.connect(tmp_path / "trackio" / "lap.db")
    steps = [step for (step,) in store.execute("SELECT step FROM metrics")]
    store.close()
    assert sorted(steps) == list(range(10))


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(run):
    """Killed after step 9 with a checkpoint of step 6, whose validation was missed."""
    lines = list(lines_until(12))
    missed = {"step": 6, "validation_loss": 2.0 - 6 / 10}
    run.metrics.unlink()
    resumed = [missed, *(line for line in lines if line["step"] > 6)]
    for part in ([line for line in lines if line["step"] <= 9 and line != missed], resumed):
        with LiveTracking(["tensorboard"], pytest.fail):
            for line in part:
                MetricsLog(run.metrics).append(line)
    check_once(tensorboard_scalars(run.path), lines)


def test_two_stages_are_two_runs(run, tmp_path):
    other = open_run(tmp_path / "runs", "other", run.recipe)
    unlock(other)
    run.metrics.unlink()
    with LiveTracking(["tensorboard"], pytest.fail):
        for each in (run, other):
            for line in lines_until(9):
                MetricsLog(each.metrics).append(line)
    for each in (run, other):
        check_once(tensorboard_scalars(each.path), lines_until(9))


class Stuck:
    def __init__(self, package, run):
        self.never = threading.Event()

    def log(self, step, values):
        self.never.wait()


class Broken(Stuck):
    def log(self, step, values):
        raise RuntimeError("the server is on fire")


@pytest.mark.parametrize(("kind", "reason"), [(Stuck, "time"), (Broken, "fire")])
def test_a_tracker_that_hangs_or_fails_is_dropped_with_one_warning(kind, reason, run, monkeypatch):
    monkeypatch.setattr(tracking, "HostedRun", kind)
    monkeypatch.setattr(tracking, "SECONDS_TO_FINISH", 1.0 if kind is Stuck else 600.0)
    run.metrics.unlink()
    warnings = []
    with LiveTracking(["wandb", "tensorboard"], warnings.append):
        for line in lines_until(9):
            MetricsLog(run.metrics).append(line)  # returns, although the tracker does not
    ours = [text for text in warnings if text.startswith("wandb")]
    assert len(ours) == 1
    assert reason in ours[0]
    assert f"lap runs track {run.path} --to wandb" in ours[0]
    assert len(read_metrics(run.metrics)) == len(list(lines_until(9)))
    if kind is Broken:  # nothing is waited for
        check_once(tensorboard_scalars(run.path), lines_until(9))
        with pytest.raises(LapError, match="fire"):
            replay(run, "wandb")


@pytest.fixture
def tiny(tmp_path):
    """A recipe file that asks for TensorBoard."""
    recipe = {**TINY, "data": {"train": str(write_text(tmp_path / "text.txt")), "validation": 0.2}}
    recipe["train"] = {**TINY["train"], "steps": STEPS}
    recipe["track"] = ["tensorboard"]
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def words(tiny, *more):
    return ("train", str(tiny), "--runs-dir", str(tiny.parent / "runs"), *more)


@pytest.mark.long
def test_after_a_kill_every_step_appears_once(tiny):
    path, cache = tiny.parent / "runs" / "tiny", tiny.parent / "cache"
    training = start_lap(*words(tiny), cache=cache)
    training.wait_for(lambda: any(line["step"] >= 8 for line in read_metrics(path / "metrics.jsonl")))
    training.send(signal.SIGKILL)
    assert training.result().returncode == -signal.SIGKILL
    done = lap(*words(tiny), cache=cache)
    assert done.returncode == 0, done.stderr
    if "does not have all" in done.stderr:  # on a busy machine: what the warning advises
        assert lap("runs", "track", str(path), "--to", "tensorboard").returncode == 0
    held, lines = tensorboard_scalars(path), read_metrics(path / "metrics.jsonl")
    # Events that TensorBoard had not flushed before the kill are missing; no other event is lost, doubled or changed.
    resumed = next(int(line["step"]) for line in reversed(lines) if "seconds_first_step" in line)
    assert len(dict(held["train/loss"])) == len(held["train/loss"])
    values = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert {step for step, _ in held["train/loss"]} >= {step for step in values if step >= resumed}
    assert all(value == pytest.approx(values[step]) for step, value in held["train/loss"])
    assert lap("runs", "track", str(path), "--to", "tensorboard").returncode == 0
    check_once(tensorboard_scalars(path), lines)


@pytest.mark.long
def test_a_server_that_never_answers_is_a_warning(tiny):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
        done = lap(*words(tiny, "--set", "track=[wandb]"), cache=tiny.parent / "cache", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "warning: wandb does not have all of tiny" in done.stderr
    assert read_run(tiny.parent / "runs" / "tiny").is_finished


def test_trackers_are_not_part_of_a_recipe(tiny):
    plain = yaml.safe_load(tiny.read_text())
    del plain["track"]
    other = tiny.with_name("other.yaml")
    other.write_text(yaml.safe_dump(plain))
    assert recipe_hash(load_recipe(tiny)) == recipe_hash(load_recipe(other))


def test_the_command_and_its_errors(run, tiny, capsys, monkeypatch):
    monkeypatch.setenv("LAP_RUNS", str(run.path.parent))
    code, out, _ = run_main(capsys, "runs", "track", "mi*", "--to", "tensorboard")
    assert (code, out) == (0, "mine: 10 steps sent to tensorboard\n")
    mistakes = {
        ("runs", "track", "mine"): "--to",
        ("runs", "track", "nine", "--to", "tensorboard"): "mine",
        ("runs", "track", "mine", "--to", "tensorbord"): "tensorboard",
        words(tiny, "--set", "track=[mlflow]"): "track",
    }
    for asked, named in mistakes.items():
        code, out, err = run_main(capsys, *asked)
        assert (code, out, named in err) == (2, "", True), err
    monkeypatch.setattr("lapcli.runtime.environment.find_spec", lambda name: None)
    code, _, err = run_main(capsys, "runs", "track", "mine", "--to", "wandb")
    assert (code, "lapcli[wandb]" in err) == (2, True)
    assert not (tiny.parent / "runs" / "tiny").exists()
