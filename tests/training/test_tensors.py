"""Files whose hashes are right and whose tensors are wrong: every command that loads them names the tensor, exit 2."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from support import edit_checkpoint, tiny_recipe, train_here, write_text
from torch import nn

from lapcli import checkpoint
from lapcli.checkpoint import check_tensors
from lapcli.objectives.objective import ParameterGroup
from lapcli.runtime.errors import DataError, Diverged
from lapcli.training.optimizers import Optimizers

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def put(name, change):
    def edit(tensors):
        tensors[name] = change(tensors[name])

    return edit


def with_value(value):
    def change(tensor):
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    return change


DAMAGES = {
    "transposed": lambda tensor: tensor.mT.contiguous(),
    "int8": lambda tensor: tensor.to(torch.int8),
    "inf": with_value(-float("inf")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, damage):
    expected = {"first": torch.zeros(2), "second": torch.randn(3, 5)}
    check_tensors(tmp_path, expected, expected)
    with pytest.raises(DataError, match="second"):
        check_tensors(tmp_path, {**expected, "second": DAMAGES[damage](expected["second"].clone())}, expected)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory, shared_cache):
    """A recipe of four steps and a run of it that has done two."""
    folder = tmp_path_factory.mktemp("tensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        text = write_text(folder / "text.txt")
        recipe = tiny_recipe(text, train={"steps": 4}, checkpoint={"every": 2}, validation={"tokens": 32})
        run = train_here(recipe, folder / "runs")
    shutil.rmtree(run.checkpoints / "step-000004")
    run.update(status="interrupted", step=2)
    return recipe, run


def resumed(unfinished, folder, file, edit):
    recipe, run = unfinished
    shutil.copytree(run.path.parent, folder / "runs")
    path = edit_checkpoint(folder / "runs" / "run" / "checkpoints" / "step-000002", file, edit)
    with pytest.raises(DataError) as refused:
        train_here(recipe, folder / "runs")
    assert str(path) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (MODEL, "blocks.1.mlp.up.weight"),
        (OPTIMIZER, "exp_avg/embed.weight"),
    ],
)
def test_a_resume_names_a_tensor_that_does_not_fit(unfinished, tmp_path, file, name):
    """A moment of another shape would let a fused kernel read beyond it."""
    assert name in resumed(unfinished, tmp_path / "less", file, lambda tensors: tensors.pop(name))
    assert "more" in resumed(unfinished, tmp_path / "more", file, lambda tensors: tensors.update(more=torch.zeros(2)))
    assert name in resumed(unfinished, tmp_path / "other", file, put(name, lambda tensor: torch.zeros(1, 3)))


def test_what_is_not_finite_is_not_saved(tmp_path):
    """It could not be resumed from, and the good checkpoint before it would have been removed."""
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


def test_parameters_without_a_gradient_are_saved_as_their_optimizer_would_begin(tmp_path):
    """So that a missing moment is always a damage; what is loaded trains as what was never saved."""
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
