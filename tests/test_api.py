"""The public API of `import lapcli`: the functions that commands call."""

import subprocess
import sys

import pytest
from support import TINY, tiny_recipe, train_here, write_text

import lapcli
from lapcli.recipe import recipe_to_yaml
from lapcli.training.metrics import read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_cache):
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        train_here(tiny_recipe(write_text(folder / "text.txt"), train={"steps": 3}), folder, "gpt")
    return folder


def test_a_run_has_its_model_numbers_and_samples(runs):
    run = lapcli.load("gpt", runs_dir=runs)
    lines = read_metrics(runs / "gpt" / "metrics.jsonl")
    assert run.metrics["loss"].dropna().tolist() == [line["loss"] for line in lines if "loss" in line]
    rows = run.results.query("task == 'validation' and metric == 'loss' and checkpoint == 'last'")
    assert rows["value"].tolist() == [lines[-1]["validation_loss"]]
    assert (rows["unit"].item(), rows["direction"].item()) == ("nats", "lower")
    assert sum(p.numel() for p in run.model.parameters()) == run.run.info["parameters"]
    assert run.tokenizer.vocab_size == TINY["tokenizer"]["vocab"]
    text = run.sample("the cat", max_tokens=5)
    assert text == run.sample("the cat", max_tokens=5)
    assert len(run.tokenizer.encode(text)) <= 5
    assert lapcli.load(runs / "gpt").recipe == run.recipe
    assert lapcli.load(runs / "gpt", checkpoint=run.run.info["step"]).loaded.weights_sha256 == run.loaded.weights_sha256


def test_a_measurement_has_a_frame_and_a_figure(runs):
    measured = lapcli.load("gpt", runs_dir=runs).analyze("spectrum", limit=8)
    assert measured.frame["layer"].tolist() == [1]
    assert (measured.frame["k_0.9"] <= measured.frame["k_0.99"]).all()
    assert measured.plot() is not None
    assert not (runs / "gpt" / "analysis").exists()


def test_training_returns_the_run_and_finds_it_again(runs, shared_cache, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    path = runs / "mine.yaml"
    path.write_text(recipe_to_yaml(tiny_recipe(runs / "text.txt")))
    run = lapcli.train(path, {"train.steps": 2, "model.laplacian_heads": 1}, runs_dir=runs)
    assert (run.run.status, run.run.info["step"], run.recipe.model.laplacian_heads) == ("finished", 2, 1)
    again = lapcli.train(path, {"train.steps": 2, "model.laplacian_heads": 1}, runs_dir=runs)
    assert again.run.info["updated"] == run.run.info["updated"]
    assert set(lapcli.results(["gpt", "mine"], runs_dir=runs)["run"]) == {"gpt", "mine"}


def test_importing_the_package_imports_no_torch():
    code = "import sys, lapcli; lapcli.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
