"""`lap plan`: its output, its exit codes, and that the dry run agrees."""

import json

import pytest
from support import ROOT, run_main, tiny_chat_recipe, tiny_recipe, train_here, write_text

from lapcli.planning import plan_training
from lapcli.recipe import recipe_to_yaml

QUICKSTART = str(ROOT / "recipes/quickstart.yaml")


def test_the_dry_run_prints_the_same_plan(capsys):
    dry = run_main(capsys, "train", QUICKSTART, "--dry-run", "--set", "train.device=cpu")
    assert dry == run_main(capsys, "plan", QUICKSTART, "--set", "train.device=cpu", "--gpu", "cpu")
    assert dry[0] == 0


def test_plan_for_gpus_that_are_not_present(capsys):
    arguments = ("plan", str(ROOT / "recipes/vitb_cifar100_12L.yaml"), "--gpu", "l40", "--gpus", "4", "--json")
    code, out, err = run_main(capsys, *arguments)
    assert code == 0, err
    found = json.loads(out)
    assert set(found["memory"]) == {"weights", "gradients", "optimizer", "activations", "temporary"}
    assert found["memory_total"] == sum(found["memory"].values())
    parameters = found["parameters"]
    # With four processes: a quarter of the weights, all of them gathered, and a quarter of the moments.
    assert found["memory"]["weights"] == pytest.approx((1 / 4 + 1) * 4 * parameters, rel=1e-5)
    assert found["memory"]["optimizer"] == pytest.approx(2 * 4 * parameters / 4, rel=1e-5)  # and counts of steps
    assert found["checkpoint_bytes"] == pytest.approx(3 * 4 * parameters, rel=1e-5)
    assert found["disk_bytes"] == 3 * found["checkpoint_bytes"]  # newest, best, and the one being written
    assert found["hours"] == pytest.approx(found["flops"] / (4 * found["mfu"] * 90.5e12) / 3600)


def test_a_plan_that_does_not_fit_exits_with_3_and_a_remedy(capsys):
    sizes = ("--set", "train.batch=8192", "--set", "train.micro_batch=8192")
    code, out, _ = run_main(capsys, "plan", QUICKSTART, *sizes, "--gpu", "l40")
    assert code == 3
    assert "--set train.micro_batch=" in out


def test_a_probe_measures(capsys):
    steps = ("--set", "train.steps=3600", "--set", "train.device=cpu")
    code, out, _ = run_main(capsys, "plan", str(ROOT / "recipes/vit_digits.yaml"), *steps, "--probe", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["hours"] == pytest.approx(found["seconds_per_step"])  # 3,600 steps


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([QUICKSTART, "--gpu", "l40", "--probe", "2"], "--gpu l40"),
        ([QUICKSTART, "--gpu", "l40", "--set", "train.device=cpu"], "train.device"),
        ([QUICKSTART, "--gpus", "3"], "3"),
        ([QUICKSTART, "--run", "any"], "--run"),
        ([str(ROOT / "recipes/chat561m.yaml"), "--runs-dir", "no_such_folder"], "no_such_folder"),
    ],
)
def test_usage_errors(arguments, named, capsys):
    code, out, err = run_main(capsys, "plan", *arguments)
    assert (code, out) == (2, "")
    assert named in err


def test_chat_stages_are_planned_with_the_pretrained_model(tmp_path, capsys):
    """Both stages have the size of the pretrained model, but their own batch sizes and lengths."""
    base = train_here(tiny_recipe(write_text(tmp_path / "text.txt"), train={"steps": 1}), tmp_path / "runs", "base")
    chat = tiny_chat_recipe(tmp_path, sft={"train": {"steps": None, "epochs": 2.0, "batch": 4, "micro_batch": 2}})
    (tmp_path / "chat.yaml").write_text(recipe_to_yaml(chat))
    options = ("--runs-dir", str(tmp_path / "runs"), "--gpu", "cpu", "--json")
    code, out, err = run_main(capsys, "plan", str(tmp_path / "chat.yaml"), *options)
    assert code == 0, err
    plans, alone = json.loads(out), plan_training(base.recipe)
    assert list(plans) == ["midtrain", "sft"]
    for plan in plans.values():
        assert (plan["parameters"], plan["flops_per_token"]) == (alone.parameters, alone.flops_per_unit)
        assert plan["memory"]["weights"] == alone.memory["weights"]
    assert plans["midtrain"]["steps"] == chat.stages.midtrain.train.steps
    assert plans["sft"]["steps"] == 2 * 40 // 4  # two passes over 40 conversations
    assert (plans["sft"]["micro_batch"], plans["sft"]["accumulation"]) == (2, 2)
