"""What a checkpoint promises beyond the resumes of test_resume.py."""

import pytest
import torch
from safetensors import safe_open
from torch import nn

from lapcli import checkpoint
from lapcli.objectives.objective import ParameterGroup
from lapcli.runtime.errors import DataError, Diverged
from lapcli.runtime.files import sha256_of_file
from lapcli.training.optimizers import Optimizers


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def save(folder, model, step, keep=2, plan="2"):
    moments = {"exp_avg/bias": torch.randn(3), "exp_avg_sq/bias": torch.rand(3)}
    optimizer = {"momentum/weight": torch.randn(3, 4), "step/bias": torch.tensor(5.0), **moments}
    return checkpoint.save(folder, step, model.state_dict(), optimizer, {"laplacian_heads": plan}, {"seed": 1}, keep)


def test_what_was_saved_comes_back(model, tmp_path):
    saved = save(tmp_path, model, 12)
    assert saved.path == tmp_path / "step-000012"
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert (found.step, found.state["seed"]) == (12, 1)
    other = nn.Linear(4, 3)
    groups = [
        ParameterGroup("matrix", "muon", 0.1, {"weight": other.weight}),
        ParameterGroup("vector", "adamw", 0.1, {"bias": other.bias}),
    ]
    optimizers = Optimizers(groups)
    found.load(other, optimizers, "2")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert optimizers.state()["step/bias"] == 5
    assert found.sha256 == saved.sha256


def test_only_the_newest_are_kept(model, tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, model, step, keep=2)
    assert checkpoint.steps_in(tmp_path) == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_later_checkpoint_does_not_displace_the_saved_one(model, tmp_path):
    """The run resumed before it and saves again on the way there."""
    save(tmp_path, model, 8, keep=1).weights.write_bytes(b"")
    for step in (5, 6):
        save(tmp_path, model, step, keep=1)
        assert checkpoint.newest(tmp_path, [].append).step == step
    assert checkpoint.steps_in(tmp_path) == [6, 8]
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(Diverged, match=r"the last good checkpoint is \S*step-000006"):
        save(tmp_path, model, 7, keep=1)


def test_weights_carry_their_head_plan_and_refuse_another(model, tmp_path):
    saved = save(tmp_path, model, 1, plan="[0, 2]")
    with safe_open(saved.weights, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["laplacian_heads"] == "[0, 2]"
    assert metadata["step"] == "1"
    with pytest.raises(DataError, match=r"laplacian_heads \[0, 2\].*has laplacian_heads 1"):
        checkpoint.load_weights(saved.weights, nn.Linear(4, 3), "1")


@pytest.mark.parametrize(("local_rank", "hashed"), [("0", 2), ("1", 0)])
def test_one_process_on_each_machine_verifies_the_files(model, tmp_path, monkeypatch, local_rank, hashed):
    """Eight ranks would read 40 GB before the first step of a resume of the 561M model."""
    saved = save(tmp_path, model, 3)
    opened = []
    monkeypatch.setattr(checkpoint, "sha256_of_file", lambda path: opened.append(path) or sha256_of_file(path))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert checkpoint.read(saved.path).weights_sha256 == saved.weights_sha256
    assert len(opened) == hashed
