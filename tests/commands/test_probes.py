"""`lap eval --tasks linear,knn,ade20k` on small runs, as a user types it."""

import hashlib
import json

import pytest
import torch
from image_support import image_recipe
from scene_support import write_scenes
from support import lap, run_main, train_here

from lapcli import checkpoint
from lapcli.models.dino_vit import StudentTeacher
from lapcli.recipe import recipe_from_dict
from lapcli.result_rows import results
from lapcli.runs import open_run
from lapcli.runtime.files import read_json

QUICK = [
    *("--set", "linear.steps=6", "--set", "linear.batch=32", "--set", "linear.rates=[0.01, 0.1]"),
    *("--set", "ade20k.window=16", "--set", "ade20k.batch=4", "--set", "ade20k.steps=3"),
]
TASKS = ["--tasks", "linear,knn,ade20k"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes") / "ade", 8, 3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A classification run, and the initial weights of a self-supervised run."""
    folder = tmp_path_factory.mktemp("probes") / "runs"
    train_here(image_recipe(train={"steps": 2}, checkpoint={"every": None, "keep": 1}), folder, "tiny")
    recipe = recipe_from_dict(
        {
            "objective": "self_supervised",
            "model": {
                "layers": 2,
                "width": 32,
                "heads": 4,
                "patch": 2,
                "laplacian_heads": 2,
                "layer_scale": 1.0,
                "head": {"hidden": 16, "bottleneck": 8, "dino_prototypes": 8, "ibot_prototypes": 8},
            },
            "data": {"train": "builtin", "validation": 0.2, "crops": {"global_size": 8, "local_size": 4}},
            "train": {"steps": 1, "batch": 16, "micro_batch": 16, "group": 16},
            "optimizer": {"lr": 1e-3},
        }
    )
    run = open_run(folder, "dino", recipe)
    model = StudentTeacher(recipe.model, seed=0)
    with torch.no_grad():  # so that it can be told whether the student or the teacher is measured
        model.student.backbone.norm.weight.fill_(3e38)  # its features are not finite
    metadata = {"laplacian_heads": str(recipe.model.head_plan())}
    checkpoint.save(run.checkpoints, 1, model.state_dict(), {"x": torch.zeros(1)}, metadata, {}, keep=1)
    run.update(status="finished", step=1)
    return folder


def measured(capsys, runs, *arguments):
    code, out, err = run_main(capsys, "eval", "--runs-dir", str(runs), *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("name", ["tiny", "dino"])
def test_all_three_on_a_run(capsys, runs, scenes, name):
    found = measured(capsys, runs, "--run", name, *TASKS, *QUICK, "--set", f"ade20k.data={scenes}")
    (weights,) = (runs / name / "checkpoints").glob("*/model.safetensors")
    assert found["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert list(found["tasks"]) == ["linear", "knn10", "knn20", "knn100", "knn200", "ade20k"]
    assert found["tasks"]["knn20"]["count"] == 359  # the run's own digits
    assert found["tasks"]["ade20k"]["count"] == 3
    assert found["limit"] is None
    for task in ("linear", "knn10", "ade20k"):
        protocol = found["tasks"][task]["details"]["protocol"]
        assert {"linear": "steps", "knn10": "temperature", "ade20k": "window"}[task] in protocol
    (kept,) = (runs / name / "eval").glob("step-*_linear+knn+ade20k_*.json")
    assert read_json(kept, "measure again") == found
    rows = results([name], runs).set_index("task")
    rows = rows[rows.index.isin(list(found["tasks"]))]
    assert rows.value.to_dict() == {task: score["value"] for task, score in found["tasks"].items()}
    assert "steps 6" in rows.conditions["linear"]
    assert rows.conditions["knn10"] == ""


@pytest.mark.long
def test_two_processes_give_the_same_numbers_as_one(capsys, runs, scenes):
    arguments = ["--run", "tiny", *TASKS, *QUICK, "--set", f"ade20k.data={scenes}", "--batch", "24"]
    one = measured(capsys, runs, *arguments)
    result = lap("eval", "--runs-dir", str(runs), *arguments, "--json", processes=2)
    assert result.returncode == 0, result.stderr
    two = json.loads(result.stdout)
    for task, score in one["tasks"].items():
        other = two["tasks"][task]
        for key in ("value", "count", "interval"):
            assert other[key] == score[key], task
    assert two["data_sha256"] == one["data_sha256"]
    losses = [[row["loss"] for row in found["tasks"]["linear"]["details"]["rates"]] for found in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_real_images(capsys, runs, test_data):
    """64-pixel photographs and real scenes through a network for 8-pixel images."""
    found = measured(
        capsys,
        runs,
        *("--run", "dino", *TASKS, *QUICK, "--limit", "60", "--data", str(test_data / "tiny_imagenet20")),
        *("--set", f"ade20k.data={test_data / 'ade20k_subset'}"),
    )
    assert found["tasks"]["knn20"]["count"] == 60
    assert "20 classes" in found["data"]
    assert found["tasks"]["ade20k"]["count"] == 25
