"""Cells at a time share what the machine has."""

import pytest
import torch
from support import run_main
from sweep_support import write_recipe

from lapcli.data.images.loader import count_workers
from lapcli.runtime.machine import usable_cores
from lapcli.sweep.slots import share_machine


@pytest.mark.parametrize(
    ("gpus", "jobs", "shares", "words"),
    [
        ("0,1,2,3", 4, ["0", "1", "2", "3"], "1 GPU each"),
        ("0,1,2,3", 2, ["0,1", "2,3"], "2 GPUs each"),
        ("4,6,7", 2, ["4", "6"], "1 GPU each, 1 idle"),
        ("GPU-a,GPU-b", 3, ["GPU-a", "GPU-b", "GPU-a"], "sharing 2 GPUs"),
    ],
)
def test_gpus(gpus, jobs, shares, words, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    slots, said = share_machine(jobs)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == shares
    assert words in said


def test_one_job_is_told_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [slot.environment for slot in share_machine(1)[0]] == [{}]


def test_threads_are_divided_and_never_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    for jobs in (2, 1000):
        threads = [int(slot.environment["OMP_NUM_THREADS"]) for slot in share_machine(jobs)[0]]
        assert len(threads) == jobs
        assert min(threads) >= 1
        assert sum(threads) <= max(usable_cores(), jobs)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in share_machine(2)[0][0].environment


def test_the_jobs_of_a_sweep_share_the_cores_of_their_data_loaders(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(32)), raising=False)
    monkeypatch.setattr("lapcli.runtime.machine._container_cores", lambda *paths: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert count_workers("auto", torch.device("cuda")) == 16
    for slot in share_machine(4)[0]:
        with monkeypatch.context() as cell:
            cell.setenv("LAP_CORES", slot.environment["LAP_CORES"])
            assert usable_cores() == 8
            assert count_workers("auto", torch.device("cuda")) == 7


def test_more_processes_than_a_cell_has_gpus_are_refused_before_any_cell_starts(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    arguments = ["sweep", str(write_recipe(tmp_path)), "--over", "seed=1,2", "--runs-dir", str(tmp_path / "runs")]
    code, _, err = run_main(capsys, *arguments, "--jobs", "2", "--nproc", "3")
    assert code == 2
    assert "--nproc 3 needs as many GPUs, and here are 2" in err
    assert not list((tmp_path / "runs").glob("tiny*"))
