"""`lap plan`: what it prints, its exit codes, and that the dry run says the same."""

import json

import pytest
from support import ROOT, run_main

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
    for shown in ("4 processes x 128 images x 1 accumulated", "L40", "estimated", "weights", "activations", "minutes"):
        assert shown in out
    found = json.loads(run_main(capsys, "plan", "recipes/vitb_cifar100_12L.yaml", *options, "--json")[1])
    assert set(found["memory"]) == {"weights", "gradients", "optimizer", "activations", "loss"}
    assert found["memory_total"] == sum(found["memory"].values())
    parameters = found["parameters"]
    assert found["memory"]["weights"] == 4 * parameters
    assert found["memory"]["optimizer"] == 2 * 4 * parameters
    assert found["checkpoint_bytes"] == 3 * 4 * parameters
    assert found["disk_bytes"] == 3 * found["checkpoint_bytes"]  # newest, best, and the one being written
    assert found["hours"] == pytest.approx(found["flops"] / (4 * found["share_of_peak"] * 90.5e12) / 3600)
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
    assert "no step was tried" in err


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
        (["recipes/chat561m.yaml"], "lap sft"),
    ],
)
def test_wrong_usage(arguments, named, capsys):
    code, out, err = run_main(capsys, "plan", *arguments)
    assert (code, out) == (2, "")
    assert named in err
