"""Run directories: never overwritten, resumed with the same result, readable after any edit of the text files."""

import io
import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
from support import (
    LOG,
    at_points_of_a_save,
    die_at,
    exit_code,
    process,
    ranks,
    run_main,
    start_child,
    tiny_recipe,
    train_here,
    wait_until,
    write_text,
)
from sweep_support import write_recipe

from lapcli.objectives.weights import find_checkpoint
from lapcli.recipe import load_recipe, recipe_from_dict, recipe_to_dict
from lapcli.runs import find_run, named_run, newest_run, open_run, read_run, unlock
from lapcli.runtime.errors import DataError, LapError, UsageError
from lapcli.training.metrics import read_metrics, without_times


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def recipe(text):
    return tiny_recipe(text, train={"steps": 4}, validation={"every": 2}, checkpoint={"every": 2})


def with_a_step(runs, name, recipe, **facts):
    """A run with a line of metrics that could be lost."""
    run = open_run(runs, name, recipe)
    run.metrics.write_text('{"step": 1, "loss": 5.0}\n')
    run.update(**{"status": "interrupted", "step": 1, **facts})
    unlock(run)
    return run


def content(run: Path) -> dict[str, bytes]:
    files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def result(run: Path):
    """The results of a training run, without timings."""
    lines = [without_times(line) for line in read_metrics(run / "metrics.jsonl")]
    return find_checkpoint(read_run(run), "last").weights_sha256, lines


# Creating and finding


def test_a_new_run_has_its_resolved_recipe_and_metadata(recipe, tmp_path):
    run = open_run(tmp_path / "runs", "first", recipe)
    info = json.loads((run.path / "run.json").read_text())
    assert recipe_from_dict(info["recipe"]) == recipe == load_recipe(run.path / "recipe.yaml")
    assert (info["status"], info["step"], info["seed"]) == ("running", 0, recipe.seed)
    assert set(info["versions"]) >= {"lap", "python", "torch"}
    assert read_run(run.path).recipe == recipe


def test_a_foreign_folder_is_not_taken_for_a_run(recipe, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("")
    with pytest.raises(UsageError, match=r"cat\.png"):
        open_run(tmp_path, "photos", recipe)
    with pytest.raises(UsageError, match=r"run\.json"):
        named_run(tmp_path, "photos")


@pytest.mark.parametrize("damage", [b"{}", b"\xff\xfe", b'{"format": 4, "step": "x"}'])
def test_a_damaged_run_json_is_named_and_no_older_run_is_used(recipe, tmp_path, damage):
    for name in ("a", "b"):
        with_a_step(tmp_path, name, recipe, status="finished")
    (tmp_path / "b" / "run.json").write_bytes(damage)
    with pytest.raises(DataError, match=r"b/run\.json.*--run"):
        newest_run(tmp_path, {"language_model"})
    assert find_run(tmp_path, "a", {"language_model"}).name == "a"


def test_every_file_of_a_run_follows_the_umask(recipe, tmp_path):
    """This includes checkpoints, which safetensors writes for the owner only: a colleague may evaluate them."""
    mask = 0o077
    before = os.umask(mask)
    try:
        train_here(recipe, tmp_path / "runs")
    finally:
        os.umask(before)
    found = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert found == {0o666 & ~mask}


# Locks


def _open_and_die(folder, values):
    open_run(folder, "first", recipe_from_dict(values)).update(status="running", step=2)
    os._exit(1)  # as after a kill: nothing is cleaned up


def test_a_killed_run_is_interrupted_and_can_be_opened(recipe, tmp_path):
    child = process(_open_and_die, tmp_path, recipe_to_dict(recipe))
    child.start()
    assert exit_code(child) == 1
    assert read_run(tmp_path / "first").status == "interrupted"
    with pytest.raises(UsageError, match="interrupted"):
        find_run(tmp_path, "first", {"language_model"})
    again = open_run(tmp_path, "first", recipe)
    assert read_run(tmp_path / "first").status == "running"
    unlock(again)


def test_a_run_folder_deleted_in_training_is_one_sentence(recipe, tmp_path, monkeypatch):
    runs = tmp_path / "runs"

    def act(point):
        if point == "after rename":
            (runs / "run").rename(runs / "other")

    at_points_of_a_save(act, monkeypatch.setattr)
    with pytest.raises(LapError, match="moved or removed"):
        train_here(recipe, runs)
    assert [path.name for path in runs.iterdir()] == ["other"]


# Resuming


def test_another_recipe_is_refused_with_the_differing_keys(recipe, text, tmp_path):
    with_a_step(tmp_path, "first", recipe)
    before = content(tmp_path / "first")
    other = tiny_recipe(text, train={"steps": 11}, seed=3, validation={"every": 2}, checkpoint={"every": 2})
    with pytest.raises(UsageError) as refused:
        open_run(tmp_path, "first", other)
    for part in ("train.steps: 4 in the run, 11 now", "seed: 0 in the run, 3 now", "--name", "--fresh"):
        assert part in str(refused.value)
    assert content(tmp_path / "first") == before


@pytest.fixture(scope="module")
def interrupted(text, tmp_path_factory, shared_cache):
    """A run that was killed right after its checkpoint of step 2, and its result without a kill."""
    folder = tmp_path_factory.mktemp("interrupted")
    recipe = tiny_recipe(text, train={"steps": 4}, validation={"every": 2}, checkpoint={"every": 2})
    assert exit_code(start_child(recipe, folder / "whole", shared_cache)) == 0
    assert exit_code(start_child(recipe, folder / "killed", shared_cache, die_at, "after rename", 1)) == -signal.SIGKILL
    return folder, recipe, result(folder / "whole" / "run")


@pytest.fixture
def killed(interrupted, tmp_path, monkeypatch):
    from support import randomise_weights

    from lapcli.models.gpt import GPT

    monkeypatch.setattr(GPT, "initialise", GPT.initialise)
    randomise_weights()  # as in the child that was killed
    shutil.copytree(interrupted[0] / "killed" / "run", tmp_path / "run")
    return tmp_path / "run"


def test_comments_and_edits_in_recipe_yaml_do_not_matter(interrupted, killed):
    _, recipe, expected = interrupted
    file = killed / "recipe.yaml"
    assert "batch: 8" in file.read_text()
    file.write_text("# a remark\n" + file.read_text().replace("batch: 8", "batch: 12"))
    assert read_run(killed).recipe == recipe  # for every command
    log = io.StringIO()
    train_here(recipe, killed.parent, log=log)
    assert result(killed) == expected
    assert "edited (train.batch)" in log.getvalue()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "micro_batch", 2),
        ("checkpoint", "every", 1),
    ],
)
def test_keys_without_effect_on_the_result_may_change_at_a_resume(interrupted, killed, section, key, value):
    _, recipe, (_, lines) = interrupted
    values = recipe_to_dict(recipe)
    old = values[section][key]
    changed = recipe_from_dict({**values, section: {**values[section], key: value}})
    log = io.StringIO()
    run = train_here(changed, killed.parent, log=log)
    assert f"{section}.{key} was {old} and is {value}" in log.getvalue()
    assert run.recipe == read_run(killed).recipe == changed
    assert load_recipe(killed / "recipe.yaml") == changed
    if section != "train":  # the file of the weights is the same, bit for bit
        assert find_checkpoint(run, "last").weights_sha256 == interrupted[2][0]
    losses = [line["loss"] for line in read_metrics(run.metrics) if "loss" in line]
    # The same batches: only the order of summation may differ.
    assert losses == pytest.approx([line["loss"] for line in lines if "loss" in line], rel=1e-5)


def test_a_resume_with_a_key_that_changes_the_result_is_refused(interrupted, killed):
    values = recipe_to_dict(interrupted[1])
    other = recipe_from_dict({**values, "train": {**values["train"], "batch": 4}})
    with pytest.raises(UsageError, match=r"train\.batch: 8 in the run, 4 now"):
        train_here(other, killed.parent)


def test_other_data_is_refused(text, tmp_path, monkeypatch):
    own = write_text(tmp_path / "own.txt")
    recipe = tiny_recipe(own, train={"steps": 4}, checkpoint={"every": 2})

    def stop(point):
        if point == "after rename":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        at_points_of_a_save(stop, patch.setattr)
        with pytest.raises(KeyboardInterrupt):
            train_here(recipe, tmp_path / "runs")
    tokenizer = (tmp_path / "runs" / "run" / "tokenizer.json").read_bytes()
    own.write_text(own.read_text() * 2)
    with pytest.raises(DataError, match="has changed"):
        train_here(recipe, tmp_path / "runs")
    assert (tmp_path / "runs" / "run" / "tokenizer.json").read_bytes() == tokenizer


@pytest.mark.parametrize("change", [{"data": {"train": "nowhere.txt"}}, {"schedule": {"warmup": 500}}])
def test_a_start_that_fails_before_the_first_step_leaves_no_run(tmp_path, capsys, change):
    recipe = write_recipe(tmp_path, **change)
    runs = tmp_path / "runs"
    code, _, err = run_main(capsys, "train", str(recipe), "--runs-dir", str(runs))
    assert (code, err.count("lap: ")) == (2, 1), err
    assert not runs.exists() or list(runs.iterdir()) == []


# --fresh


def _wait_in_update(folder):
    """Report the first update, and make it on request."""
    import time

    from lapcli.training.optimizers import Optimizers

    before = Optimizers.step

    def update(self):
        Path(folder, "in update").touch()
        while not Path(folder, "go on").exists():
            time.sleep(0.02)
        before(self)

    Optimizers.step = update


def test_a_run_in_training_is_not_moved_aside(recipe, tmp_path, shared_cache):
    first = start_child(recipe, tmp_path / "runs", shared_cache, _wait_in_update, str(tmp_path))
    wait_until((tmp_path / "in update").exists)
    assert exit_code(start_child(recipe, tmp_path / "runs", shared_cache, fresh=True)) == 2
    assert f"process {first.pid} on" in (tmp_path / "runs" / LOG).read_text()
    (tmp_path / "go on").touch()
    assert exit_code(first) == 0
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == ["run"]


@pytest.mark.parametrize("processes", [1, 2])
def test_fresh_moves_the_old_run_aside(recipe, text, tmp_path, shared_cache, processes):
    train_here(recipe, tmp_path)
    before = content(tmp_path / "run")
    other = tiny_recipe(text, train={"steps": 2}, seed=1)
    children = [start_child(other, tmp_path, shared_cache, fresh=True, environment=rank) for rank in ranks(processes)]
    assert [exit_code(child) for child in children] == [0] * processes, (tmp_path / LOG).read_text()
    assert content(tmp_path / "run.old-1") == before
    assert "run.old-1" in (tmp_path / LOG).read_text()
    found = read_run(tmp_path / "run")
    assert (found.status, found.recipe.seed) == ("finished", 1)
    assert find_checkpoint(found, "last").weights_sha256 == found.info["weights_sha256"]


# Checkpoints
