"""A killed classification run, started again, ends bit for bit where the uninterrupted one does.

Augmentation, erasing, mixup, CutMix, repeated augmentation and drop path are on, and images are read by workers.
"""

import json
import signal

import pytest
import torch
from image_support import image_recipe
from safetensors.torch import load_file
from support import die_at, die_in_update, exit_code, start_child

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
