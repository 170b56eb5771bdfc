"""A GPT learns text from another package's source and is asked that package's questions."""

import json

import pytest

RECIPE = """
objective: language_model
model: {layers: 2, width: 32, heads: 4, context: 32, laplacian_heads: 2}
tokenizer: {vocab: 270}
data: {train: "plugin:sums", validation: 0.2}
train: {steps: 6, batch: 16, micro_batch: 16, threads: 1}
validation: {every: 3, tokens: 1024}
checkpoint: {every: 3, keep: 3}
"""


@pytest.fixture(scope="module")
def recipe(extended):
    path = extended.runs / "adder.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture(scope="module")
def adder(extended, recipe):
    extended("train", recipe, "--name", "adder")
    return extended.runs / "adder"


def test_the_source_is_fetched_and_named_in_the_run(extended, recipe, adder):
    assert extended("fetch", recipe).returncode == 0
    info = json.loads((adder / "run.json").read_text())
    assert info["status"] == "finished"


def test_the_benchmark_is_asked_scored_and_reported(extended, adder):
    ask = ("eval", "--run", "adder", "--tasks", "sums", "--protocol", "harness", "--json")
    first, again = (json.loads(extended(*ask).stdout)["tasks"] for _ in range(2))
    assert first["sums"]["count"] == 100
    assert first["sums"]["value"] in [n / 100 for n in range(101)]
    assert again == first
    assert "sums (%)" in extended("report", "--format", "markdown").stdout


def test_a_name_that_no_package_has_is_refused_with_the_nearest(extended, recipe):
    assert "sums" in extended("train", recipe, "--set", "data.train=plugin:sumz", code=2).stderr
