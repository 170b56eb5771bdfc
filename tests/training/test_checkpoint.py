"""Guarantees of checkpoints beyond the resumes in test_resume.py."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from support import edit_checkpoint, tiny_recipe, train_here, write_text
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


def test_a_checkpoint_round_trips(model, tmp_path):
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


def test_a_damaged_later_checkpoint_does_not_replace_the_saved_one(model, tmp_path):
    """The run resumed from an earlier step and reaches this step again."""
    save(tmp_path, model, 8, keep=1).weights.write_bytes(b"")
    for step in (5, 6):
        save(tmp_path, model, step, keep=1)
        assert checkpoint.newest(tmp_path, [].append).step == step
    assert checkpoint.steps_in(tmp_path) == [6, 8]
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(Diverged, match=r"the last good checkpoint is \S*step-000006"):
        save(tmp_path, model, 7, keep=1)


@pytest.mark.parametrize(("local_rank", "hashed"), [("0", 2), ("1", 0)])
def test_one_process_on_each_machine_verifies_the_files(model, tmp_path, monkeypatch, local_rank, hashed):
    """Otherwise eight ranks would read 40 GB to resume the 561M model."""
    saved = save(tmp_path, model, 3)
    opened = []
    monkeypatch.setattr(checkpoint, "sha256_of_file", lambda path: opened.append(path) or sha256_of_file(path))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert checkpoint.read(saved.path).weights_sha256 == saved.weights_sha256
    assert len(opened) == hashed


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory, shared_cache):
    """A four-step recipe and a run of it after two steps."""
    folder = tmp_path_factory.mktemp("tensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        text = write_text(folder / "text.txt")
        recipe = tiny_recipe(text, train={"steps": 4}, checkpoint={"every": 2}, validation={"tokens": 32})
        run = train_here(recipe, folder / "runs")
    shutil.rmtree(run.checkpoints / "step-000004")
    run.update(status="interrupted", step=2)
    return recipe, run


@pytest.mark.parametrize(
    ("file", "name", "change"),
    [
        ("model", "blocks.1.mlp.up.weight", lambda tensors, name: tensors.pop(name)),
        # A moment with a wrong shape would let a fused kernel read out of bounds.
        ("optimizer", "exp_avg/embed.weight", lambda tensors, name: tensors.update({name: torch.zeros(1, 3)})),
        ("optimizer", "more", lambda tensors, name: tensors.update({name: torch.zeros(2)})),
    ],
)
def test_a_resume_names_a_mismatched_tensor(unfinished, tmp_path, file, name, change):
    """Its hash is correct, as if somebody had updated the hashes too."""
    recipe, run = unfinished
    shutil.copytree(run.path.parent, tmp_path / "runs")
    folder = tmp_path / "runs" / "run" / "checkpoints" / "step-000002"
    path = edit_checkpoint(folder, f"{file}.safetensors", lambda tensors: change(tensors, name))
    with pytest.raises(DataError, match=name) as refused:
        train_here(recipe, tmp_path / "runs")
    assert str(path) in str(refused.value)


def test_non_finite_tensors_are_not_saved(tmp_path):
    """It could not be resumed, and the good checkpoint before it would have been removed."""
    model = nn.Linear(3, 2)

    def save(step, optimizer):
        checkpoint.save(tmp_path, step, model.state_dict(), optimizer, {"laplacian_heads": "0"}, {}, keep=1)

    save(1, {})
    for broken in (model.weight, torch.zeros(4)):
        with torch.no_grad():
            broken.view(-1)[1] = torch.inf
        with pytest.raises(Diverged, match=r"(weight|moment) is not finite after step 2.*step-000001"):
            save(2, {"moment": broken.detach()})
        with torch.no_grad():
            model.weight.zero_()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_parameters_without_a_gradient_are_saved_with_initial_optimizer_state(tmp_path):
    """Therefore a missing moment always means damage; loaded state trains exactly like state that was never saved."""
    ends = []
    for saves in (False, True):
        torch.manual_seed(0)
        used, late = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3, 2))
        for kind in ("adamw", "muon", "lamb"):
            groups = [ParameterGroup("all", kind, 0.1, {"used": used, "late": late})]
            optimizers = Optimizers(groups)
            used.grad = torch.ones_like(used)
            optimizers.step()
            if saves:
                state = optimizers.state()
                assert {name.partition("/")[2] for name in state} == {"used", "late"}
                optimizers = Optimizers(groups)
                save_file(state, tmp_path / "state.safetensors")
                optimizers.load_state(tmp_path / "state.safetensors")
            used.grad, late.grad = torch.ones_like(used), torch.arange(6.0).view(3, 2)
            optimizers.step()
            optimizers.zero_grad()
        ends.append([used.detach(), late.detach()])
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)
