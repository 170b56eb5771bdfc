"""The small trainings of the doctor, in real processes: each check passes here, and is seen to fail."""

import json

import pytest
from support import lap

from lapcli.doctor import training
from lapcli.doctor.training import check_raise, check_ranks, check_resume, training_checks

pytestmark = pytest.mark.slow  # they train runs


def test_a_killed_run_resumes(tmp_path):
    assert check_resume(tmp_path, "cpu").status == "passes"


def test_a_run_that_resumes_otherwise(tmp_path, monkeypatch):
    """Between the kill and the resume, the optimizer has lost its state."""
    from support import edit_checkpoint

    train = training.train

    def forgetful(folder, name, *arguments, **options):
        for saved in (folder / "runs" / "killed" / "checkpoints").glob("step-*"):
            edit_checkpoint(saved, "optimizer.safetensors", lambda state: [x.zero_() for x in state.values()])
        return train(folder, name, *arguments, **options)

    monkeypatch.setattr(training, "train", forgetful)
    found = check_resume(tmp_path, "cpu")
    assert found.status == "fails"
    assert "differs" in found.text


def test_a_run_that_finishes_before_it_is_killed(tmp_path):
    assert check_resume(tmp_path, "cpu", steps=2).status == "fails"


def test_ranks_are_equal_and_one_that_raises_ends_all(tmp_path):
    assert check_ranks(tmp_path, 2, "cpu").status == "passes"
    assert check_raise(tmp_path, 2, "cpu").status == "passes"


def test_ranks_that_do_not_start_or_end_by_another_error(tmp_path, monkeypatch):
    found = check_ranks(tmp_path, 2, "none")
    assert found.status == "fails"
    assert "train.device" in found.text
    monkeypatch.setattr(training, "PLANNED", "an error that no rank raises")
    assert check_raise(tmp_path, 2, "cpu").status == "fails"


def test_a_mac_is_not_asked_for_what_it_does_not_have(tmp_path):
    """Apple's GPUs have no deterministic algorithms."""
    assert not training_checks(tmp_path, "mps")
    assert training_checks(tmp_path, "cpu")


def test_the_command(shared_cache):
    result = lap("doctor", "--only", "environment", "--json", cache=shared_cache)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["fails"] == 0
    assert {check["section"] for check in found["checks"]} == {"environment"}
    assert all(check["name"] in result.stderr for check in found["checks"])
    assert lap("doctor", "--only", "processes", "--nproc", "1", cache=shared_cache).returncode == 2
