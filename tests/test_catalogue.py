"""Runs are listed according to their own files; nothing in training or needed to resume is removed."""

import json
import shutil

import pytest
import torch
from support import tiny_recipe, train_here, write_text

from lapcli.catalogue import (
    list_runs,
    prunable,
    remove_checkpoints,
    remove_run,
    rename_run,
    size_of,
)
from lapcli.objectives.weights import find_checkpoint
from lapcli.runs import open_run, read_run, unlock
from lapcli.runtime.errors import UsageError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shared_cache):
    """A run with checkpoints at 3, 6, 9 and 10."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        train_here(tiny_recipe(write_text(folder / "text.txt"), checkpoint={"keep": 9}), folder / "runs", "base")
    return folder / "runs"


@pytest.fixture
def runs(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def steps(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())


def test_pruning_keeps_the_newest_and_the_best(runs):
    base = runs / "base"
    assert steps(base) == [3, 6, 9, 10]
    lines = [json.loads(line) for line in (base / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # the best validated step that has a checkpoint is to be 6; step 4 is better and has none
        if "validation_bits_per_byte" in line:
            line["validation_bits_per_byte"] = {4: 0.5, 8: 3.0, 10: 3.0}.get(line["step"], 9.0)
    lines.append({"step": 6, "validation_bits_per_byte": 1.0})
    (base / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    remove_checkpoints(base, prunable(read_run(base), keep=1))
    assert steps(base) == [6, 10]
    assert find_checkpoint(read_run(base), "last").step == 10


def test_a_run_whose_newest_checkpoint_is_damaged_is_not_pruned(runs):
    """The run could only be resumed from the checkpoint that would be removed."""
    newest = runs / "base" / "checkpoints" / "step-000010" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    with pytest.raises(UsageError, match="damaged checkpoint"):
        prunable(read_run(runs / "base"), keep=1)


def test_a_run_in_training_is_not_pruned(runs, tmp_path):
    run = open_run(runs, "busy", tiny_recipe(tmp_path / "text.txt"))
    for change in (lambda: remove_run(run.path), lambda: rename_run(run, "other"), lambda: prunable(run, 1)):
        with pytest.raises(UsageError, match="is being trained"):
            change()
    unlock(run)  # its process is gone, though run.json says running
    remove_run(run.path)
    assert not run.path.exists()


@pytest.fixture
def two_runs(tmp_path):
    """Two runs with a few lines of metrics, the second written a day later."""
    for name, day, values in (("old-run", 3, [2.5, 2.0, 2.25]), ("new-run", 4, [3.0])):
        run = open_run(tmp_path, name, tiny_recipe(tmp_path / "text.txt"))
        lines = [{"step": 0, "validation_bits_per_byte": 1.0}]  # an untrained model has no checkpoint and is not best
        lines += [{"step": step, "validation_bits_per_byte": value} for step, value in enumerate(values, 1)]
        lines += [{"step": 4, "loss": 1.0}]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
        run.update(status="interrupted", step=3, steps=10)
        set_updated(run, f"2026-01-0{day}T00:00:00+0000")
        unlock(run)
    return tmp_path


def set_updated(run, moment):
    file = run.path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "updated": moment}))


def test_the_newest_run_comes_first_with_its_best_validation(two_runs):
    new, old = list_runs(two_runs)
    assert (new["name"], old["name"]) == ("new-run", "old-run")
    assert old["best"] == {"metric": "validation_bits_per_byte", "value": 2.0, "step": 2}
    known = [old[key] for key in ("objective", "plan", "step", "steps", "status")]
    assert known == ["language_model", "2", 3, 10, "interrupted"]
    assert old["seconds_since"] - new["seconds_since"] == pytest.approx(86400, abs=5)


def test_a_damaged_run_is_listed_as_such(two_runs):
    (two_runs / "new-run" / "run.json").write_text("{")
    damaged = next(run for run in list_runs(two_runs) if run["name"] == "new-run")
    assert damaged["status"] == "damaged"
    assert "run.json is damaged" in damaged["problem"]
    assert damaged["bytes"] == size_of(two_runs / "new-run") > 0
