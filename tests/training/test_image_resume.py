"""A killed classification run, started again, ends bit for bit where the uninterrupted one does.

Augmentation, erasing, mixup, CutMix, repeated augmentation and drop path are on, and images are read by workers.
"""

import json
import shutil
import signal

import pytest
import torch
from image_support import image_recipe, write_folder
from safetensors.torch import load_file
from support import die_at, die_in_update, exit_code, run_main, start_child, train_here

from lapcli.recipe import recipe_to_yaml, values_hash
from lapcli.runtime.errors import DataError
from lapcli.training import checkpoint
from lapcli.training.metrics import read_metrics, without_times

STEPS = 10
OPTIMIZERS = {
    "lamb": {"name": "lamb", "lr": 3e-3, "weight_decay": 0.02},
    "adamw": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.05, "betas": [0.9, 0.99]},
}


def recipe_with(optimizer):
    loss = {"lamb": "binary_cross_entropy", "adamw": "cross_entropy"}[optimizer]
    return image_recipe(
        optimizer=OPTIMIZERS[optimizer],
        train={"loss": loss},
        data={"workers": 1, "augmentation": {"repeats": 3}},
    )


def final_state(runs):
    folder = runs / "run" / "checkpoints" / f"step-{STEPS:06d}"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")}


def assert_same_bits(a, b):
    for name in ("model", "optimizer"):
        assert a[name].keys() == b[name].keys()
        for key in a[name]:
            left, right = (x[name][key].flatten().view(torch.uint8) for x in (a, b))
            assert torch.equal(left, right), f"{name} {key}"


def numbers(runs):
    lines = read_metrics(runs / "run" / "metrics.jsonl")
    return [without_times(line) for line in lines]


@pytest.fixture(scope="module", params=["lamb", "adamw"])
def uninterrupted(request, tmp_path_factory, shared_cache):
    runs = tmp_path_factory.mktemp("uninterrupted")
    recipe = recipe_with(request.param)
    assert exit_code(start_child(recipe, runs, shared_cache)) == 0, (runs / "child.log").read_text()
    return recipe, runs


def test_a_run_does_not_go_on_with_other_images(tmp_path, shared_cache):
    """The same files with two labels exchanged."""
    data = write_folder(tmp_path / "data", {"train": {"a": 8, "b": 8}, "val": {"a": 2, "b": 2}})
    recipe = image_recipe(
        model={"classes": 2},
        data={"train": str(data), "validation": None, "workers": 0},
        train={"batch": 8, "micro_batch": 8},
    )
    runs = tmp_path / "runs"
    assert exit_code(start_child(recipe, runs, shared_cache, die_in_update, 4)) == -signal.SIGKILL
    for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
        (data / "train" / old).rename(data / "train" / new)
    with pytest.raises(DataError, match=r"the data of .* has changed since it began"):
        train_here(recipe, runs)


def test_weights_with_a_layer_scale_that_the_recipe_does_not_have_get_a_sentence(
    tmp_path, shared_cache, monkeypatch, capsys
):
    """As version 0.1 left them for `layer_scale: null`: no command takes them for what the recipe says."""
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    recipe = image_recipe(model={"layer_scale": None}, train={"steps": 2}, data={"workers": 0})
    run = train_here(recipe, tmp_path / "runs", "tiny-seed0")
    saved = checkpoint.newest(run.checkpoints, pytest.fail)
    weights = load_file(saved.weights)
    assert not any("gamma" in name for name in weights)
    gammas = {f"blocks.{n}.ls{i}.gamma": torch.full((32,), 1e-6) for n in (0, 1) for i in (1, 2)}
    metadata = {"laplacian_heads": str(recipe.model.head_plan())}
    shutil.rmtree(saved.path)
    old = checkpoint.save(run.checkpoints, 2, {**weights, **gammas}, {}, metadata, {"seed": 0}, keep=1)
    (tmp_path / "tiny.yaml").write_text(recipe_to_yaml(recipe))
    train = ("train", str(tmp_path / "tiny.yaml"), "--name", "tiny-seed0")
    named = ("blocks.0.ls1.gamma", "model.layer_scale: null")
    for status, command, words in (
        ("finished", ("eval", "--run", "tiny-seed0"), named),
        ("finished", ("analyze", "cossim", "--run", "tiny-seed0"), named),
        ("finished", train, ("model.layer_scale: 1e-06 in the run, null now", "--fresh")),
        ("interrupted", train, ("model.layer_scale: 1e-06 in the run, null now", "--fresh")),
        ("finished", ("sweep", train[1], "--over", "seed=0"), ("model.layer_scale 1e-06 in the run, null now",)),
    ):
        info = {key: run.info[key] for key in run.info if key != "recipe_file_sha256"}
        info["recipe_sha256"] = values_hash((run.path / "recipe.yaml").read_text())
        info.update(status=status, weights_sha256=old.weights_sha256)
        (run.path / "run.json").write_text(json.dumps(info))
        code, _, err = run_main(capsys, *command, "--runs-dir", str(run.path.parent))
        assert code == 2, err
        said = " ".join(err.split())
        assert all(word in said for word in words), said
        assert "Traceback" not in said
    assert old.weights.exists()


def test_killed_and_resumed(uninterrupted, tmp_path, shared_cache):
    recipe, reference = uninterrupted
    # From step 0 into the fourth update, from the checkpoint of step 3 or 4 into the next save, then to the end.
    assert exit_code(start_child(recipe, tmp_path, shared_cache, die_in_update, 4)) == -signal.SIGKILL
    assert exit_code(start_child(recipe, tmp_path, shared_cache, die_at, "model written", 2)) == -signal.SIGKILL
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    assert_same_bits(final_state(tmp_path), final_state(reference))
    assert numbers(tmp_path) == numbers(reference)


def test_best_and_last_are_kept(uninterrupted, tmp_path, shared_cache):
    recipe, _ = uninterrupted
    few = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"keep": 1, "every": None})})
    assert exit_code(start_child(few, tmp_path, shared_cache)) == 0
    validated = {line["step"]: line["validation_top1"] for line in numbers(tmp_path) if "validation_top1" in line}
    assert list(validated) == [0, 4, 8, 10]
    del validated[0]
    best = max(validated, key=lambda step: (validated[step], -step))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_step"] == best
    assert set(kept) == {f"step-{best:06d}", "step-000010"}


def test_a_signal_saves_and_exits_with_75_while_workers_read_ahead(uninterrupted, tmp_path, shared_cache):
    recipe, reference = uninterrupted
    assert exit_code(start_child(recipe, tmp_path, shared_cache, _ask_to_stop_in_update, 5)) == 75
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["status"], info["step"]) == ("interrupted", 5)
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    assert_same_bits(final_state(tmp_path), final_state(reference))


def _ask_to_stop_in_update(step):
    import os

    from lapcli.training.optimizers import Optimizers

    before = Optimizers.step
    done = 0

    def update(self):
        nonlocal done
        done += 1
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)
        before(self)

    Optimizers.step = update
