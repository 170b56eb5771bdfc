"""A single rank fails during an evaluation: all ranks exit, and the reason is printed."""

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness_support import make_run, write_benchmarks
from support import exit_code, process, ranks

GUARD = 300.0  # seconds after which ranks are taken to hang
REASON = "CUDA out of memory. Tried to allocate 20.00 MiB"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    return make_run(folder / "runs"), write_benchmarks(folder / "data")


@pytest.mark.parametrize(
    ("failing", "place", "error"),
    [
        (1, "job", "memory"),
        pytest.param(0, "job", "bug", marks=pytest.mark.long),
        pytest.param(1, "loading", "memory", marks=pytest.mark.long),
    ],
)
def test_an_error_on_one_rank_ends_all_ranks_with_its_message(made, tmp_path, failing, place, error):
    run, data = made
    arguments = ["eval", "--run", str(run.path), "--tasks", "arc_easy", "--data", str(data)]
    children = [
        process(_rank, world, rank == failing, place, error, arguments, str(tmp_path))
        for rank, world in enumerate(ranks(2))
    ]
    for child in children:
        child.start()
    codes = [exit_code(child, GUARD) for child in children]
    said = [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    assert codes[failing] == 1, said
    assert codes[1 - failing] in (1, 76), said
    assert " ".join("".join(said).split()).count(REASON) >= 1, said
    if place == "job":
        # Rank 0 prints the message, and it names the failed rank.
        assert f"rank {failing}" in said[0]
        assert "lap:" not in said[1]


def _rank(environment, fails, place, error, arguments, folder):
    os.environ.update(environment, HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    rank = int(environment["RANK"])
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    kind = torch.OutOfMemoryError if error == "memory" else KeyError

    def raises(*_args, **_options):
        raise kind(REASON)

    if fails:
        from lapcli.evaluation import adapter, run_tasks

        owner, name = {
            "job": (adapter, "score"),
            "loading": (run_tasks, "open_run"),
        }[place]
        setattr(owner, name, raises)

    destroy = dist.destroy_process_group

    def destroy_together(*args):
        """As in NCCL, wait until all ranks destroy their group."""
        Path(folder, f"{rank}.left").touch()
        while len(list(Path(folder).glob("*.left"))) < 2:
            time.sleep(0.05)
        destroy(*args)

    dist.destroy_process_group = destroy_together
    import sys

    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = ["lap", *arguments]
    from lapcli.cli import main

    with contextlib.redirect_stdout(sys.stderr):
        main()
