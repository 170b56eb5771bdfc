"""Every kind of extension from another package in two training runs: its objective and optimizer, and its text
source, operator and benchmark; then every command on these runs."""

import json
import os
import signal

import pytest
from safetensors.torch import load_file
from support import start_lap

ADDER = """
objective: language_model
model: {layers: 2, width: 32, heads: 4, context: 32, laplacian_heads: 0, operators: {damped: 2}}
tokenizer: {vocab: 270}
data: {train: "plugin:sums", validation: 0.2}
train: {steps: 6, batch: 16, micro_batch: 16, threads: 1}
validation: {every: 3, tokens: 1024}
checkpoint: {every: 3, keep: 3}
"""
LION = ["--set", "optimizer.name=lion", "--set", "optimizer.lr=1e-3"]


@pytest.fixture(scope="module")
def painted(extended):
    extended("train", extended.recipe, *LION, "--name", "painted")
    return extended.runs / "painted"


@pytest.fixture(scope="module")
def adder(extended):
    (extended.runs / "adder.yaml").write_text(ADDER)
    extended("train", str(extended.runs / "adder.yaml"))
    return extended.runs / "adder"


def status(run):
    return json.loads((run / "run.json").read_text())["status"]


def steps(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_training_with_an_external_objective_and_optimizer(painted):
    assert status(painted) == "finished"
    assert [step for step, _ in steps(painted)] == [1, 2, 3, 4, 5, 6]
    state = load_file(painted / "checkpoints" / "step-000006" / "optimizer.safetensors")
    assert {name.partition("/")[0] for name in state} == {"average"}


def test_training_with_an_external_source_and_operator(adder):
    assert status(adder) == "finished"
    weights = load_file(adder / "checkpoints" / "step-000006" / "model.safetensors")
    shares = weights["blocks.0.attn.operators.damped_share"]
    assert shares.shape == (2,)
    assert (shares - 0.25).abs().max() > 0


@pytest.mark.long
def test_a_killed_run_resumes_with_the_same_bits(extended, painted, shared_cache):
    environment = {**os.environ, "PYTHONPATH": extended.path, "LAP_RUNS": str(extended.runs)}
    command = ("train", extended.recipe, *LION, "--name", "killed")
    child = start_lap(*command, cache=shared_cache, environment=environment)
    child.wait_for(lambda: (extended.runs / "killed" / "checkpoints" / "step-000002").is_dir())
    child.send(signal.SIGKILL)
    assert child.result().returncode == -signal.SIGKILL
    extended(*command)
    killed = extended.runs / "killed"
    assert steps(killed) == steps(painted)
    last = "checkpoints/step-000006/model.safetensors"
    assert (killed / last).read_bytes() == (painted / last).read_bytes()


def test_models_are_evaluated_by_their_outputs(extended, painted, adder):
    knn = json.loads(extended("eval", "--run", "painted", "--tasks", "knn", "--json").stdout)["tasks"]["knn20"]
    assert (knn["count"], 0.1 < knn["value"] <= 1) == (359, True)  # better than guessing, even after a few steps
    ask = ("eval", "--run", "adder", "--tasks", "sums", "--protocol", "harness", "--json")
    first, again = (json.loads(extended(*ask).stdout)["tasks"] for _ in range(2))
    assert first["sums"]["count"] == 100
    assert again == first
    assert "sums (%)" in extended("report").stdout


def test_an_analysis_measures_both_models(extended, painted, adder):
    for run in (painted, adder):
        extended("analyze", "spread", "--run", run.name)
        assert (run / "analysis" / "spread.json").stat().st_size > 0


def test_extensions_can_be_planned(extended, adder):
    adamw, lion = (json.loads(extended("plan", extended.recipe, *how, "--json").stdout) for how in ([], LION))
    assert lion["memory"]["optimizer"] == pytest.approx(adamw["memory"]["optimizer"] / 2, rel=0.01)
    assert "A A D D" in extended("plan", str(extended.runs / "adder.yaml")).stdout


@pytest.mark.parametrize(
    ("recipe", "change", "named"),
    [
        ("painter", "model.hiden=0.5", "hidden"),
        ("adder", "data.train=plugin:sumz", "sums"),
        ("adder", "model.operators={dampt: 2}", "damped"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(extended, adder, recipe, change, named):
    result = extended("train", str(extended.runs / f"{recipe}.yaml"), "--set", change, code=2)
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_without_the_package_its_runs_are_named_and_skipped(extended, painted):
    environment = {**os.environ, "LAP_RUNS": str(extended.runs)}
    result = start_lap("eval", "--run", "painted", "--tasks", "knn", environment=environment).result()
    assert result.returncode == 2
    assert "masked_autoencoder" in result.stderr
    assert "Traceback" not in result.stderr
