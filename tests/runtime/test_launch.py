"""Several processes on the CPU, through the command: killed, stopped, restarted, interrupted, on two "machines"."""

import os
from unittest.mock import patch

import pytest
import yaml
from support import (
    ROOT,
    TINY,
    run_main,
    start_lap,
    train_here,
    write_text,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lapcli.recipe import load_recipe
from lapcli.runtime.errors import ExitCode, LapError, UsageError, from_peer_error
from lapcli.runtime.launch import Processes, _explain, _torchrun_options, launch, needs_launch

pytestmark = pytest.mark.slow  # they start processes


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def write_recipe(text, tmp_path):
    """A tiny recipe of so many steps, saved every ten."""

    def write(steps):
        path = tmp_path / "tiny.yaml"
        sections = {**TINY, "data": {**TINY["data"], "train": str(text)}}
        sections["train"] = {**TINY["train"], "steps": steps}
        sections["checkpoint"] = {"every": 10, "keep": 2}
        sections["validation"] = {**TINY["validation"], "every": None}
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


def test_a_batch_that_some_number_of_machines_cannot_share_is_refused(write_recipe, tmp_path, capsys):
    place = ["--nnodes", "2:3", "--rdzv", "127.0.0.1:1", "--max-restarts", "1", "--nproc", "1"]
    code, _, said = run_main(capsys, "train", str(write_recipe(10)), "--runs-dir", str(tmp_path), *place)
    assert (code, said.splitlines()[-1].startswith("lap: ")) == (2, True)
    assert "3 machines" in said
    assert "train.batch" in said


#: What a rank does first: destroying the group waits until all ranks do it, as with NCCL, and rank 1 fails alone.
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


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_rank_that_fails_alone_says_so_and_ends_all(command, write_recipe, tmp_path):
    """It leaves without the others, who wait for it elsewhere."""
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


@pytest.mark.parametrize(("number", "is_host"), [(0, "1"), (1, "0")])
def test_machines_meet_through_c10d_and_know_the_host(number, is_host):
    from torch.distributed.run import config_from_args, parse_args

    options = _torchrun_options(
        Processes("8", nnodes="4", node_rank=number, rdzv="127.0.0.1:29500", max_restarts=3), ""
    )
    config, _, _ = config_from_args(parse_args([*options, "-m", "lapcli"]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (4, 4, 8, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.local_addr) == ("c10d", "127.0.0.1:29500", "127.0.0.1")
    assert config.rdzv_configs["is_host"] == is_host


def test_a_host_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr("lapcli.runtime.launch.SECONDS_TO_MEET", 1)
    with patch.dict(os.environ), pytest.raises(LapError, match=r"127\.0\.0\.1:1 "):
        launch(Processes("1", nnodes="2", node_rank=1, rdzv="127.0.0.1:1"), ["train"], "cpu")


def test_a_process_needs_a_gpu_of_its_own(monkeypatch, tmp_path, write_recipe, capsys):
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
def test_wrong_numbers_are_refused(processes, named):
    with pytest.raises(UsageError, match=named):
        needs_launch(processes)


def test_a_rank_that_lost_another_leaves_the_last_word_to_it(capsys, monkeypatch):
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
