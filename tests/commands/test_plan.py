"""`lap plan`: what it prints, its exit codes, and that the dry run says the same."""

import json

import pytest
from support import ROOT, run_main, tiny_chat_recipe, tiny_recipe, train_here, write_text

from lapcli.objectives.classification import Classification
from lapcli.objectives.objective import Objective
from lapcli.planning import plan_training
from lapcli.recipe import load_recipe, recipe_to_yaml
from lapcli.runtime.errors import UsageError

pytestmark = pytest.mark.slow  # plans are seconds each

QUICKSTART = str(ROOT / "recipes/quickstart.yaml")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_dry_run_says_the_same(capsys):
    dry = run_main(capsys, "train", QUICKSTART, "--dry-run", "--set", "train.device=cpu")
    plan = run_main(capsys, "plan", QUICKSTART, "--set", "train.device=cpu", "--gpu", "cpu")
    assert dry == plan
    assert plan[0] == 0


def test_on_gpus_that_are_not_here(capsys):
    options = ("--gpu", "l40", "--gpus", "4")
    code, out, _ = run_main(capsys, "plan", "recipes/vitb_cifar100_12L.yaml", *options)
    assert code == 0
    for shown in ("4 processes x 128 images x 1 accumulated", "L40", "estimated", "weights", "activations", "hours"):
        assert shown in out
    found = json.loads(run_main(capsys, "plan", "recipes/vitb_cifar100_12L.yaml", *options, "--json")[1])
    assert set(found["memory"]) == {"weights", "gradients", "optimizer", "activations", "temporary"}
    assert found["memory_total"] == sum(found["memory"].values())
    parameters = found["parameters"]
    # Of four processes: a quarter of the weights, and all of them gathered; a quarter of the moments.
    assert found["memory"]["weights"] == pytest.approx((1 / 4 + 1) * 4 * parameters, rel=1e-5)
    assert found["memory"]["optimizer"] == pytest.approx(2 * 4 * parameters / 4, rel=1e-5)  # and counts of steps
    assert found["checkpoint_bytes"] == pytest.approx(3 * 4 * parameters, rel=1e-5)
    assert found["disk_bytes"] == 3 * found["checkpoint_bytes"]  # newest, best, and the one being written
    assert found["hours"] == pytest.approx(found["flops"] / (4 * found["mfu"] * 90.5e12) / 3600)
    assert found["probe"] is None


def test_too_large_is_exit_code_3_with_the_way_out(capsys):
    options = ("--gpu", "l40", "--set", "train.micro_batch=256", "--set", "model.layers=4", "--set", "model.width=2560")
    code, out, _ = run_main(capsys, "plan", "recipes/gpt561m_0L.yaml", *options)
    assert code == 3
    assert "does not fit" in out
    assert "--set train.micro_batch=" in out


def test_what_does_not_fit_is_not_tried(capsys):
    code, out, err = run_main(
        capsys, "plan", QUICKSTART, "--set", "train.batch=1000000", "--set", "train.micro_batch=1000000", "--probe", "1"
    )
    assert code == 3
    assert "does not fit" in out
    assert "no step was measured" in err


def test_a_probe_measures(capsys):
    recipe = ("recipes/vit_digits.yaml", "--set", "train.steps=3600", "--set", "train.device=cpu")
    code, out, _ = run_main(capsys, "plan", *recipe, "--probe", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["probe"]["steps"] == 2
    assert found["hours"] == pytest.approx(found["probe"]["seconds_per_step"])  # 3,600 steps
    code, out, _ = run_main(capsys, "plan", *recipe, "--probe", "1")
    assert "measured here" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["recipes/quickstart.yaml", "--gpu", "l40", "--probe", "2"], "leave --gpu l40 out"),
        (["recipes/quickstart.yaml", "--gpu", "l40", "--set", "train.device=cpu"], "train.device is cpu"),
        (["recipes/quickstart.yaml", "--gpu", "cpu", "--set", "train.device=cuda"], "train.device is cuda"),
        (["recipes/quickstart.yaml", "--gpus", "3"], "cannot be shared evenly by 3"),
        (["recipes/quickstart.yaml", "--gpu", "v100"], "--gpu"),
        (["recipes/quickstart.yaml", "--run", "any"], "has a model of its own"),
        (["recipes/chat561m.yaml", "--runs-dir", "no_such_folder"], "no_such_folder"),
    ],
)
def test_wrong_usage(arguments, named, capsys):
    code, out, err = run_main(capsys, "plan", *arguments)
    assert (code, out) == (2, "")
    assert named in err


SHIPPED = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if "chat" not in path.stem)
QUICK = ("quickstart", "vit_digits", "dino_quickstart", "vit_cifar10_small")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SHIPPED]
)
def test_every_shipped_recipe(name, capsys):
    code, out, err = run_main(capsys, "plan", f"recipes/{name}.yaml", "--gpu", "h100", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["fits"] is True
    assert plan["flops_per_step"] > 6 * plan["parameters"] / 2  # a batch has more than one token for each weight


def test_chat_stages_are_planned_with_the_model_of_their_run(tmp_path, monkeypatch, capsys):
    """Both stages have the pretrained model's size, and their own batches and lengths."""
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "cache"))
    base = train_here(tiny_recipe(write_text(tmp_path / "text.txt"), train={"steps": 1}), tmp_path / "runs", "base")
    chat = tiny_chat_recipe(tmp_path, sft={"train": {"steps": None, "epochs": 2.0, "batch": 4, "micro_batch": 2}})
    (tmp_path / "chat.yaml").write_text(recipe_to_yaml(chat))
    options = ("--runs-dir", str(tmp_path / "runs"), "--gpu", "cpu")
    code, out, err = run_main(capsys, "plan", str(tmp_path / "chat.yaml"), *options, "--json")
    assert code == 0, err
    plans = json.loads(out)
    alone = plan_training(base.recipe)
    assert list(plans) == ["midtrain", "sft"]
    for plan in plans.values():
        assert (plan["parameters"], plan["flops_per_token"]) == (alone.parameters, alone.flops_per_unit)
        assert plan["memory"]["weights"] == alone.memory["weights"]
    assert plans["midtrain"]["steps"] == chat.stages.midtrain.train.steps
    assert plans["sft"]["steps"] == 2 * 40 // 4  # two passes over 40 conversations
    assert (plans["sft"]["micro_batch"], plans["sft"]["accumulation"]) == (2, 2)
    code, out, _ = run_main(capsys, "plan", str(tmp_path / "chat.yaml"), *options, "--run", "base")
    assert code == 0
    assert out.startswith("midtrain\nparameters")
    assert "padded to the longest" in out


class Bare(Classification):
    """An objective that says nothing for plans."""

    synthetic_batch = Objective.synthetic_batch


def test_an_objective_without_synthetic_batches_is_one_sentence(monkeypatch):
    monkeypatch.setattr("lapcli.objectives.classification.Classification", Bare)
    with pytest.raises(UsageError, match="recipes of classification cannot be planned"):
        plan_training(load_recipe(ROOT / "recipes/vit_digits.yaml"))
