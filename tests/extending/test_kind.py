"""A kind of training from another package goes through every command."""

import json
import os
import signal

import pytest
from support import start_lap


@pytest.fixture(scope="module")
def painted(extended):
    extended("train", extended.recipe, "--name", "painted")
    return extended.runs / "painted"


def steps(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def weights(run):
    return (run / "checkpoints" / "step-000006" / "model.safetensors").read_bytes()


def test_it_trains_and_says_whose_it_is(painted):
    info = json.loads((painted / "run.json").read_text())
    assert info["status"] == "finished"
    assert [step for step, _ in steps(painted)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_killed_run_resumes_with_the_same_bits(extended, painted, shared_cache):
    environment = {**os.environ, "PYTHONPATH": extended.path, "LAP_RUNS": str(extended.runs)}
    command = ("train", extended.recipe, "--name", "killed")
    child = start_lap(*command, cache=shared_cache, environment=environment)
    child.wait_for(lambda: (extended.runs / "killed" / "checkpoints" / "step-000002").is_dir())
    child.send(signal.SIGKILL)
    assert child.result().returncode == -signal.SIGKILL
    extended(*command)
    killed = extended.runs / "killed"
    assert steps(killed) == steps(painted)
    assert weights(killed) == weights(painted)


@pytest.mark.long
def test_two_processes_train_it(extended, painted):
    extended("train", extended.recipe, "--name", "two", "--set", "train.micro_batch=16", processes=2)
    for (_, ours), (_, alone) in zip(steps(extended.runs / "two"), steps(painted), strict=True):
        assert ours == pytest.approx(alone, rel=1e-5)


def test_a_wrong_key_of_its_recipe_is_refused(extended, painted):
    result = extended("train", extended.recipe, "--set", "model.hiden=0.5", code=2)
    assert "model.hiden" in result.stderr
    assert "hidden" in result.stderr
    assert "Traceback" not in result.stderr


def test_it_is_evaluated_by_what_its_models_give(extended, painted):
    result = extended("eval", "--run", "painted", "--tasks", "knn", "--json")
    task = json.loads(result.stdout)["tasks"]["knn20"]
    assert task["count"] == 359
    assert 0.1 < task["value"] <= 1  # better than guessing, even after a few steps


def test_it_is_planned(extended, painted):
    assert json.loads(extended("plan", extended.recipe, "--json").stdout)["parameters"] > 0


def test_it_is_analysed(extended, painted):
    extended("analyze", "cossim", "--run", "painted")
    assert (painted / "analysis" / "cossim.csv").stat().st_size > 0


@pytest.mark.long
def test_it_is_swept_and_reported(extended, painted):
    extended("sweep", extended.recipe, "--over", "model.laplacian_heads=0,3", "--over", "seed=0,1", "--name", "grid")
    text = extended("report", "--format", "markdown").stdout
    assert "validation_loss" in text or "validation loss" in text
    assert "painted" in text or "masked" in text


def test_without_the_package_its_runs_are_named_and_skipped(extended, painted):
    environment = {**os.environ, "LAP_RUNS": str(extended.runs)}
    result = start_lap("eval", "--run", "painted", "--tasks", "knn", environment=environment).result()
    assert result.returncode == 2
    assert "objective" in result.stderr
    assert "Traceback" not in result.stderr
