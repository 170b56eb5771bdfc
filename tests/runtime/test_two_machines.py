"""Two machines, as two network namespaces joined by a cable, with two processes each: the cable is pulled, a machine
dies and returns, and one gets a signal. No other address is reachable."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from support import TINY, start_process, train_here, wait_until, write_text

from lapcli.recipe import load_recipe
from lapcli.training.metrics import read_metrics

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="it needs root and iproute2's ip"),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines():
    """The names of both namespaces; each has one end of the cable, `wire`, with the address 10.77.0.1 or 10.77.0.2."""
    names = [f"lap{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [f"lp{os.getpid() % 10**7}{letter}" for letter in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            ip("link", "set", end, "netns", name, "name", "wire")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_lost_cable_a_dead_machine_and_a_signal(machines, tmp_path, shared_cache):
    recipe, run = tmp_path / "tiny.yaml", tmp_path / "runs" / "tiny"
    sections = {**TINY, "data": {**TINY["data"], "train": str(write_text(tmp_path / "text.txt"))}}
    sections["train"] = {**TINY["train"], "steps": 100_000, "micro_batch": 1}
    sections["checkpoint"] = {"every": 10, "keep": 2}
    sections["validation"] = {**TINY["validation"], "every": None}
    recipe.write_text(yaml.safe_dump(sections))

    def start(number: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "lapcli", "train", str(recipe), "--runs-dir", str(tmp_path / "runs")]
        command += ["--nproc", "2", "--nnodes", "2", "--node-rank", str(number), "--rdzv", "10.77.0.1:29511"]
        command += ["--max-restarts", "20", "--step-timeout", "0.3"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "wire", "LAP_CACHE": str(shared_cache)}
        with (tmp_path / f"machine{number}.log").open("ab") as log:
            within = ["ip", "netns", "exec", machines[number], *command]
            return start_process(within, env=environment, stdout=log, stderr=log)

    def steps() -> list[int]:
        return [line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]

    def wait_for_steps(count: int) -> None:
        target = max(steps(), default=0) + count
        wait_until(lambda: max(steps(), default=0) >= target, told=lambda: (tmp_path / "machine0.log").read_text())

    started = [start(0), start(1)]
    try:
        wait_for_steps(30)
        ip("-n", machines[1], "link", "set", "wire", "down")
        noticed = (tmp_path / "machine0.log").stat().st_size
        wait_until(lambda: (tmp_path / "machine0.log").stat().st_size > noticed)
        ip("-n", machines[1], "link", "set", "wire", "up")
        wait_for_steps(30)
        started[1].send_signal(signal.SIGKILL)
        started[1].wait()
        started[1] = start(1)
        wait_for_steps(30)
        started[1].send_signal(signal.SIGTERM)
        assert [machine.wait() for machine in started] == [75, 75]
    finally:
        for machine in started:
            machine.kill()
    info = json.loads((run / "run.json").read_text())
    assert (info["status"], info["world_size"]) == ("interrupted", 4)
    assert steps() == list(range(1, info["step"] + 1))
    train_here(load_recipe(recipe, ["train.steps=60"]), tmp_path / "alone", "tiny")
    one, four = (
        {line["step"]: line["loss"] for line in read_metrics(each / "tiny" / "metrics.jsonl") if "loss" in line}
        for each in (tmp_path / "alone", tmp_path / "runs")
    )
    for step in range(1, 30):  # later the learning rate of the shorter run falls
        assert four[step] == pytest.approx(one[step], rel=1e-4)
