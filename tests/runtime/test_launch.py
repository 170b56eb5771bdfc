"""Several processes on the CPU, through the command: killed, stopped, restarted, interrupted, on two "machines"."""

import json
import os
import signal
import socket
import subprocess
from unittest.mock import patch

import pytest
import yaml
from support import (
    ROOT,
    TINY,
    Command,
    ranks,
    run_main,
    start_lap,
    train_here,
    wait_until,
    write_text,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lapcli.recipe import load_recipe
from lapcli.runs import open_run, unlock
from lapcli.runtime.errors import ExitCode, LapError, UsageError, from_peer_error
from lapcli.runtime.launch import Processes, _explain, _torchrun_options, launch, needs_launch
from lapcli.training.metrics import read_metrics

pytestmark = pytest.mark.slow  # they start processes


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def write_recipe(text, tmp_path):
    """A tiny recipe with `steps` steps, saved every ten."""

    def write(steps):
        path = tmp_path / "tiny.yaml"
        sections = {**TINY, "data": {**TINY["data"], "train": str(text)}}
        sections["train"] = {**TINY["train"], "steps": steps}
        sections["checkpoint"] = {"every": 10, "keep": 2}
        sections["validation"] = {**TINY["validation"], "every": None}
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def last_step(run):
    return max((line["step"] for line in read_metrics(run / "metrics.jsonl")), default=0)


def wait_for_steps(command: Command, run, count: int) -> None:
    """Wait until the run is this many steps further; a resume repeats up to ten of them."""
    target = last_step(run) + count
    command.wait_for(lambda: last_step(run) >= target)


def ranks_of(launcher: Command) -> list[int]:
    """Its child processes, oldest first."""
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return sorted(int(row.split()[0]) for row in rows.splitlines() if int(row.split()[1]) == launcher.child.pid)


def wait_until_gone(pids: list[int]) -> None:
    """A zombie has ended too: only its new parent has not reaped it."""

    def states() -> list[str]:
        shown = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(map(str, pids))], capture_output=True, text=True)
        return shown.stdout.split()

    wait_until(lambda: all(state.startswith("Z") for state in states()), states)


def info_of(run):
    return json.loads((run / "run.json").read_text())


def losses(run):
    return {line["step"]: line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line}


@pytest.mark.long
def test_two_machines_continue_after_losing_a_rank(write_recipe, tmp_path):
    """The launchers count restarts separately, but still join again; the run is finished.

    An old run of that name is moved aside once, not again by the restart.
    """
    recipe = write_recipe(60)
    unlock(open_run(tmp_path, "tiny", load_recipe(recipe)))
    arguments = ["--nnodes", "2", "--rdzv", f"127.0.0.1:{free_port()}", "--max-restarts", "1", "--fresh"]
    machines = [
        start_lap("train", str(recipe), "--nproc", "1", "--runs-dir", str(tmp_path), *arguments) for _ in range(2)
    ]
    run = tmp_path / "tiny"
    wait_for_steps(machines[0], run, 12)
    assert (tmp_path / "tiny.old-1").is_dir()
    os.kill(ranks_of(machines[1])[0], signal.SIGKILL)
    results = [machine.result() for machine in machines]
    assert [result.returncode for result in results] == [0, 0], results
    said = "".join(result.stderr for result in results)
    assert said.count("resuming from") == 1
    assert (info_of(run)["status"], info_of(run)["world_size"]) == ("finished", 2)
    assert sorted(losses(run)) == list(range(1, 61))
    assert not (tmp_path / "tiny.old-2").exists()


@pytest.mark.long
def test_a_machine_is_lost_returns_and_is_stopped(write_recipe, tmp_path):
    """One or two machines: the run continues on the rest with the same global batches; the old run stays."""
    recipe, run = write_recipe(100_000), tmp_path / "tiny"
    unlock(open_run(tmp_path, "tiny", load_recipe(recipe)))
    place = ["--nnodes", "1:2", "--rdzv", f"127.0.0.1:{free_port()}", "--max-restarts", "5", "--nproc", "1"]

    def start(number):
        given = [*place, "--node-rank", str(number), "--runs-dir", str(tmp_path), "--fresh"]
        return start_lap("train", str(recipe), *given)

    def wait_for_machines(count):
        """Wait until the run has made steps with this many machines."""
        head.wait_for(lambda: info_of(run).get("world_size") == count and info_of(run)["status"] == "running")
        before = max(losses(run), default=0)
        head.wait_for(lambda: max(losses(run), default=0) > before + 3)

    head, other = start(0), start(1)
    wait_for_steps(head, run, 12)
    wait_for_machines(2)
    other.send(signal.SIGKILL)
    wait_for_machines(1)
    other = start(1)
    wait_for_machines(2)
    other.send(signal.SIGTERM)
    assert other.result().returncode == 75
    wait_for_machines(1)
    head.send(signal.SIGTERM)
    assert head.result().returncode == 75
    info, found = info_of(run), losses(run)
    assert (info["status"], info["world_size"]) == ("interrupted", 1)
    assert sorted(found) == list(range(1, info["step"] + 1))
    assert [path.name for path in tmp_path.glob("tiny.old*")] == ["tiny.old-1"]
    alone = tmp_path / "alone"
    steps = min(200, info["step"])
    train_here(load_recipe(recipe, [f"train.steps={steps}"]), alone, "tiny")
    for step, loss in losses(alone / "tiny").items():
        if step < steps // 2:  # later the learning rate of the shorter run falls
            assert found[step] == pytest.approx(loss, rel=1e-4)


def test_a_batch_that_does_not_divide_by_every_machine_count_is_refused(write_recipe, tmp_path, capsys):
    place = ["--nnodes", "2:3", "--rdzv", "127.0.0.1:1", "--max-restarts", "1", "--nproc", "1"]
    code, _, said = run_main(capsys, "train", str(write_recipe(10)), "--runs-dir", str(tmp_path), *place)
    assert (code, said.splitlines()[-1].startswith("lap: ")) == (2, True)
    assert "3 machines" in said
    assert "train.batch" in said


@pytest.mark.long
def test_launchers_and_ranks_that_die_or_get_a_signal(write_recipe, tmp_path):
    """After any kind of end no rank is left, the next command resumes, and the losses are those of one process."""
    recipe, run = write_recipe(300), tmp_path / "two" / "tiny"

    def start(*options):
        return start_lap("train", str(recipe), "--runs-dir", str(tmp_path / "two"), *options)

    def start_two_ranks():
        launcher = start("--nproc", "2")
        wait_for_steps(launcher, run, 12)
        return launcher, ranks_of(launcher)

    launcher, started = start_two_ranks()
    assert len(started) == 2
    launcher.send(signal.SIGKILL)  # the ranks end with it
    wait_until_gone(started)
    launcher.result()

    launcher, started = start_two_ranks()
    os.kill(started[1], signal.SIGKILL)  # the other one ends, and the launcher says why
    failed = launcher.result()
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].endswith("was ended by SIGKILL; run the same command to resume")
    assert "Traceback" not in failed.stderr
    assert info_of(run)["status"] != "finished"
    wait_until_gone(started)

    launcher, started = start_two_ranks()
    os.kill(started[1], signal.SIGSTOP)
    launcher.send(signal.SIGTERM)
    launcher.send(signal.SIGTERM)  # as `timeout` does: one request, and it waits for the ranks to save
    # Of signals that arrive together Python handles the lowest number first.
    launcher.wait_for(lambda: "SIGTERM" in launcher.files[2].read_text())
    launcher.send(signal.SIGINT)  # the first Ctrl-C after it ends all at once
    assert launcher.result().returncode == ExitCode.STOPPED
    wait_until_gone(started)

    arguments = ["--nproc", "1", "--nnodes", "2", "--rdzv", f"127.0.0.1:{free_port()}"]
    machines = [start(*arguments, "--node-rank", str(number)) for number in range(2)]
    wait_for_steps(machines[0], run, 12)
    machines[1].send(signal.SIGTERM)  # one machine is asked, and all save
    stopped = [machine.result() for machine in machines]
    assert [result.returncode for result in stopped] == [75, 75], stopped
    assert not any("torch/distributed/elastic" in result.stderr for result in stopped), stopped
    info = info_of(run)
    assert (info["status"], info["world_size"]) == ("interrupted", 2)

    loaded = load_recipe(recipe)
    train_here(loaded, tmp_path / "two", "tiny")  # goes on in one process
    train_here(loaded, tmp_path / "one", "tiny")  # one process from the start
    two, one = losses(run), losses(tmp_path / "one" / "tiny")
    assert sorted(two) == list(range(1, 301))
    for step in range(1, info["step"] + 21):
        assert two[step] == pytest.approx(one[step], rel=1e-4), step


#: Code that each rank runs first: as in NCCL, destroying the group waits for all ranks, and rank 1 fails alone.
BROKEN_RANK = """
import os, pathlib, time
if "RANK" in os.environ:
    import torch.distributed as dist
    from lapcli.evaluation import run_tasks
    from lapcli.objectives.language_model import LanguageModel

    folder, destroy = pathlib.Path(__file__).parent, dist.destroy_process_group

    def destroy_with_all():
        (folder / os.environ["RANK"]).touch()
        while not all((folder / rank).exists() for rank in "01"):
            time.sleep(0.02)
        destroy()

    def fails(*arguments):
        raise RuntimeError("it is broken here")

    dist.destroy_process_group = destroy_with_all
    if os.environ["RANK"] == "1":
        LanguageModel.batch = run_tasks.open_run = fails
"""


@pytest.mark.parametrize("command", ["train", pytest.param("eval", marks=pytest.mark.long)])
def test_a_single_failing_rank_reports_it_and_ends_all(command, write_recipe, tmp_path):
    """It exits alone, while the others wait for it elsewhere."""
    arguments = ["train", str(write_recipe(100_000))]
    if command == "eval":
        train_here(load_recipe(write_recipe(2)), tmp_path / "runs", "tiny")
        arguments = ["eval", "--run", "tiny", "--tasks", "bpb"]
    (tmp_path / "sitecustomize.py").write_text(BROKEN_RANK)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    launcher = start_lap(*arguments, "--runs-dir", str(tmp_path / "runs"), "--nproc", "2", environment=environment)
    failed = launcher.result()
    assert failed.returncode == 1, failed
    assert failed.stderr.count("RuntimeError: it is broken here") == 1
    assert failed.stderr.count("Traceback") == 1


@pytest.mark.long
def test_an_unresponsive_rank_ends_the_step(write_recipe, tmp_path):
    """After the ranks' timeout, which the message names."""
    recipe = str(write_recipe(100_000))
    options = ["--step-timeout", "0.1", "--runs-dir", str(tmp_path)]
    started = [start_lap("train", recipe, *options, environment=rank) for rank in ranks(2)]
    wait_for_steps(started[0], tmp_path / "tiny", 12)
    started[1].send(signal.SIGSTOP)
    result = started[0].result()
    started[1].send(signal.SIGKILL)
    started[1].result()
    assert result.returncode == 1
    assert "--step-timeout" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert info_of(tmp_path / "tiny")["status"] == "failed"


@pytest.mark.long
@pytest.mark.parametrize("asked", ["launcher", "rank"])
def test_restarts_do_not_undo_a_stop(asked, write_recipe, tmp_path):
    recipe, run = write_recipe(100_000), tmp_path / "tiny"
    launcher = start_lap("train", str(recipe), "--runs-dir", str(tmp_path), "--nproc", "2", "--max-restarts", "3")
    wait_for_steps(launcher, run, 12)
    started = ranks_of(launcher)
    os.kill(launcher.child.pid if asked == "launcher" else started[1], signal.SIGTERM)
    stopped = launcher.result()
    assert stopped.returncode == 75, stopped
    assert stopped.stderr.count("saved. Run the same command to resume") == 1
    info = info_of(run)
    assert (info["status"], info["step"]) == ("interrupted", last_step(run))
    wait_until_gone(started)


@pytest.mark.parametrize(("number", "is_host"), [(0, "1"), (1, "0")])
def test_machines_join_through_c10d_and_know_the_host(number, is_host):
    from torch.distributed.run import config_from_args, parse_args

    options = _torchrun_options(
        Processes("8", nnodes="4", node_rank=number, rdzv="127.0.0.1:29500", max_restarts=3), ""
    )
    config, _, _ = config_from_args(parse_args([*options, "-m", "lapcli"]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (4, 4, 8, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.local_addr) == ("c10d", "127.0.0.1:29500", "127.0.0.1")
    assert config.rdzv_configs["is_host"] == is_host


def test_a_missing_host_is_one_sentence(monkeypatch):
    monkeypatch.setattr("lapcli.runtime.launch.SECONDS_TO_MEET", 1)
    with patch.dict(os.environ), pytest.raises(LapError, match=r"127\.0\.0\.1:1 "):
        launch(Processes("1", nnodes="2", node_rank=1, rdzv="127.0.0.1:1"), ["train"], "cpu")


def test_each_process_needs_its_own_gpu(monkeypatch, tmp_path, write_recipe, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert needs_launch(Processes("2"))
    assert needs_launch(Processes("3"), "cpu")
    for device in ("auto", "cuda"):
        with pytest.raises(UsageError, match=r"--nproc 3 needs as many GPUs, but this machine has 2.*use --nproc 2"):
            needs_launch(Processes("3"), device)
    code, out, err = run_main(capsys, "train", str(write_recipe(10)), "--nproc", "3", "--runs-dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert "--nproc 3 needs as many GPUs" in err
    assert run_main(capsys, "train", "recipes/quickstart.yaml", "--nproc", "8", "--dry-run")[0] == 0  # for elsewhere


@pytest.mark.parametrize(
    ("processes", "named"),
    [
        (Processes("many"), "--nproc"),
        (Processes("1", nnodes="2"), "--rdzv HOST:PORT"),
        (Processes("1", nnodes="2", rdzv="a:1", node_rank=2), "--node-rank"),
        (Processes("1", nnodes="4:2", rdzv="a:1"), "4:2"),
        (Processes("1", nnodes="2:4", rdzv="a:1"), "--max-restarts"),
    ],
)
def test_invalid_counts_are_refused(processes, named):
    with pytest.raises(UsageError, match=named):
        needs_launch(processes)


def test_the_failed_rank_reports_the_error_not_the_ones_that_lost_it(capsys, monkeypatch):
    def failed(*codes):
        """Ranks in the order in which they ended."""
        failures = {rank: ProcessFailure(rank, 100 + rank, code, "none") for rank, code in enumerate(codes)}
        for rank, failure in failures.items():
            failure.timestamp = rank
        return _explain(failures, False), capsys.readouterr().err

    assert failed(ExitCode.LOST_PEER, ExitCode.USAGE) == (ExitCode.USAGE, "")
    assert failed(ExitCode.LOST_PEER, ExitCode.FAILED) == (ExitCode.FAILED, "")
    code, said = failed(ExitCode.LOST_PEER, ExitCode.LOST_PEER)
    assert (code, said.count("lap: "), "lost the connection" in said) == (ExitCode.FAILED, 1, True)

    gone = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:2449")
    assert from_peer_error(gone) is None  # a process that stands alone has no peer
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert from_peer_error(gone).exit_code == ExitCode.LOST_PEER
    assert from_peer_error(RuntimeError("shapes do not match")) is None
