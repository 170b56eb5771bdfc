"""Two processes on the CPU, through the command: killed, restarted, interrupted, and gone on with by one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from support import ROOT, TINY, tiny_recipe, train_here, write_text

from lapcli.runtime.errors import UsageError
from lapcli.runtime.launch import Processes, _torchrun_options, needs_launch
from lapcli.training.metrics import read_metrics

STEPS = 100


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def recipe(text, tmp_path):
    path = tmp_path / "tiny.yaml"
    sections = {**TINY, "data": {**TINY["data"], "train": str(text)}}
    sections["train"] = {**TINY["train"], "steps": STEPS}
    sections["checkpoint"] = {"every": 10, "keep": 2}
    sections["validation"] = {**TINY["validation"], "every": None}
    path.write_text(yaml.safe_dump(sections))
    return path


def start(recipe, runs, *options):
    command = [sys.executable, "-m", "lapcli", "train", str(recipe), "--nproc", "2", "--runs-dir", str(runs), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process, runs, step):
    metrics = runs / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not any(line["step"] >= step for line in read_metrics(metrics)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "training did not start in time"
        time.sleep(0.02)


def last_child(pid):
    """The youngest process that `pid` started: one of its ranks."""
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children = [int(row.split()[0]) for row in rows.splitlines() if int(row.split()[1]) == pid]
    return max(children)


def losses(run):
    return {line["step"]: line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line}


def test_ranks_that_die_a_restart_a_stop_and_another_world_size(recipe, text, tmp_path):
    """A dead rank ends the others; with a restart left they go on from the last checkpoint, without one the command
    fails within seconds. SIGTERM saves, and one process goes on with the losses of one process."""
    process = start(recipe, tmp_path / "two", "--max-restarts", "1")
    wait_for_step(process, tmp_path / "two", 12)
    os.kill(last_child(process.pid), signal.SIGKILL)
    wait_for_step(process, tmp_path / "two", 22)
    os.kill(last_child(process.pid), signal.SIGKILL)
    killed = time.monotonic()
    error = process.communicate(timeout=60)[1]
    assert time.monotonic() - killed < 20
    assert process.returncode == 1
    assert "going on from" in error
    assert "was ended by SIGKILL; run the same command to go on" in error
    assert json.loads((tmp_path / "two" / "tiny" / "run.json").read_text())["status"] != "finished"

    process = start(recipe, tmp_path / "two")
    wait_for_step(process, tmp_path / "two", 26)
    os.kill(process.pid, signal.SIGTERM)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 75, error
    info = json.loads((tmp_path / "two" / "tiny" / "run.json").read_text())
    assert info["status"] == "interrupted"
    assert info["world_size"] == 2

    from lapcli.recipe import load_recipe

    loaded = load_recipe(recipe)
    train_here(loaded, tmp_path / "two", "tiny")  # goes on in one process
    train_here(loaded, tmp_path / "one", "tiny")  # one process from the start
    two, one = losses(tmp_path / "two" / "tiny"), losses(tmp_path / "one" / "tiny")
    assert sorted(two) == list(range(1, STEPS + 1))
    for step in range(1, info["step"] + 21):
        assert two[step] == pytest.approx(one[step], rel=1e-5), step


def test_two_ranks_take_different_halves_of_the_same_batch(text, tmp_path):
    from lapcli.objectives.batching import plan_batches

    for processes in (1, 2, 4):
        plan = plan_batches(8, 4, processes)
        taken = [
            position
            for micro_step in range(plan.accumulation)
            for rank in range(processes)
            for position in range(plan.first(micro_step, rank), plan.first(micro_step, rank) + plan.micro_batch)
        ]
        assert taken == list(range(8))
    with pytest.raises(UsageError, match=r"train\.batch=9"):
        plan_batches(8, 4, 3)
    recipe = tiny_recipe(text)
    assert plan_batches(recipe.train.batch, 3, 1).micro_batch == 2  # the largest within 3 that divides 8


def test_inside_torchrun_it_does_not_launch_again(monkeypatch):
    assert needs_launch(Processes(nproc="2"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not needs_launch(Processes(nproc="2"))


def test_machines_pass_through_to_torchrun():
    from torch.distributed.run import config_from_args, parse_args

    options = _torchrun_options(Processes("8", nnodes=4, node_rank=1, rdzv="head:29500", max_restarts=3), "auto")
    config, _, _ = config_from_args(parse_args([*options, "-m", "lapcli"]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (4, 4, 8, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "head:29500")
    assert config.rdzv_configs["rank"] == 1


@pytest.mark.parametrize(
    ("processes", "named"),
    [
        (Processes("many"), "--nproc"),
        (Processes("0"), "--nproc"),
        (Processes("1", nnodes=2), "--rdzv HOST:PORT"),
        (Processes("1", nnodes=2, rdzv="nowhere"), "HOST:PORT"),
        (Processes("1", nnodes=2, rdzv="a:1", node_rank=2), "--node-rank"),
        (Processes("1", nnodes=0), "--nnodes"),
    ],
)
def test_wrong_numbers_are_refused(processes, named):
    with pytest.raises(UsageError, match=named):
        needs_launch(processes)
