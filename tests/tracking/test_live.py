"""Runs that are mirrored while they are trained, with the real packages: every step once, and no tracker in the way."""

import json
import os
import signal
import socket
from collections import Counter
from importlib.util import find_spec

import pytest
import yaml
from support import TINY, lap, start_lap, write_text
from tracking_support import tensorboard_scalars, wandb_scalars

from lapcli.recipe import load_recipe, recipe_hash
from lapcli.runs import read_run

STEPS = 40


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


def step_of(path):
    lines = (path / "metrics.jsonl").read_text().splitlines() if (path / "metrics.jsonl").is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def take_the_rest(path, *trackers):
    """What a warning advises: on a busy machine a mirror may not have ended in the seconds that it has."""
    for words in trackers:
        done = lap("track", str(path), "--to", *words.split())
        assert done.returncode == 0, done.stderr


def test_after_two_kills_of_the_training_every_step_is_there_once(tiny):
    path = tiny.parent / "runs" / "tiny"
    environment = {"WANDB_MODE": "offline"}
    for step in (8, 20):
        training = start_lap(*words(tiny, "--track", "wandb"), cache=tiny.parent / "cache", environment=environment)
        training.wait_for(lambda step=step: step_of(path) >= step)
        training.send(signal.SIGKILL)
        assert training.result().returncode == -signal.SIGKILL
    done = lap(*words(tiny, "--track", "wandb"), cache=tiny.parent / "cache", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "not mirrored" not in done.stderr
    take_the_rest(path, "tensorboard", "wandb --offline")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for held in (tensorboard_scalars(path), wandb_scalars(path)):
        for tag, name in (("train/loss", "loss"), ("validation/loss", "validation_loss")):
            expected = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
            assert sorted(held[tag]) == expected
        assert set(Counter(step for step, _ in held["train/loss"]).values()) == {1}


def test_a_tracker_that_never_answers_is_a_warning(tiny):
    """W&B would wait for its server for minutes; the training ends, and takes W&B's own process with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
        done = lap(*words(tiny, "--track", "wandb"), cache=tiny.parent / "cache", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "warning: wandb did not receive all of tiny in time; send the rest with lap track" in done.stderr
    path = tiny.parent / "runs" / "tiny"
    assert read_run(path).is_finished
    take_the_rest(path, "tensorboard")
    assert len(tensorboard_scalars(path)["train/loss"]) == STEPS  # the other one has everything
    commands = []
    for process in os.listdir("/proc") if os.path.isdir("/proc") else []:
        try:
            with open(f"/proc/{process}/cmdline", "rb") as file:
                commands.append(file.read())
        except OSError:  # no process, or one that has ended
            continue
    assert not [command for command in commands if os.fsencode(path) in command]


def test_a_tracker_that_is_not_set_up_is_a_warning(tiny):
    home = {"HOME": str(tiny.parent), "WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": os.devnull}
    done = lap(*words(tiny, "--track", "wandb"), cache=tiny.parent / "cache", environment=home)
    assert done.returncode == 0, done.stderr
    told = ("warning: tiny is not mirrored to wandb: W&B cannot be used", "warning: wandb did not receive all of tiny")
    assert any(text in done.stderr for text in told)  # the second where the machine is too busy to learn the reason


def test_mirrors_are_no_part_of_a_recipe(tiny):
    plain = yaml.safe_load(tiny.read_text())
    del plain["track"]
    other = tiny.with_name("other.yaml")
    other.write_text(yaml.safe_dump(plain))
    assert recipe_hash(load_recipe(tiny)) == recipe_hash(load_recipe(other))
    assert lap(*words(other, "--name", "tiny"), cache=tiny.parent / "cache").returncode == 0
    again = lap(*words(tiny), cache=tiny.parent / "cache")  # the same run, now with a mirror
    assert again.returncode == 0, again.stderr
    path = tiny.parent / "runs" / "tiny"
    assert "track" not in (path / "recipe.yaml").read_text()
    take_the_rest(path, "tensorboard")
    assert len(tensorboard_scalars(path)["train/loss"]) == STEPS  # it was finished before, and is sent now


def test_what_cannot_be_mirrored_is_refused_before_anything_starts(tiny):
    wrong = lap(*words(tiny, "--track", "tensorbord"))
    assert (wrong.returncode, "tensorboard" in wrong.stderr) == (2, True)
    wrong = lap(*words(tiny, "--set", "track=[mlflow]"))
    assert (wrong.returncode, "track" in wrong.stderr) == (2, True)
    if find_spec("trackio") is None:
        missing = lap(*words(tiny, "--track", "trackio"))
        assert (missing.returncode, "pip install 'lapcli[trackio]'" in missing.stderr) == (2, True)
    assert not (tiny.parent / "runs").exists()
