"""A run directory is never overwritten and never half there."""

import json
import os
import socket

import pytest
from image_support import image_recipe
from support import tiny_recipe

from lapcli.recipe import load_recipe
from lapcli.runs import open_run, opening, read_run
from lapcli.runs.opening import discard_untrained, move_into_place, unlock
from lapcli.runtime import files
from lapcli.runtime.errors import LapError, UsageError


@pytest.fixture
def recipe(tmp_path):
    return tiny_recipe(tmp_path / "text.txt")


def test_a_new_run_has_its_resolved_recipe_and_says_what_it_is(recipe, tmp_path):
    run = open_run(tmp_path / "runs", "first", recipe)
    assert load_recipe(run.path / "recipe.yaml") == recipe
    info = json.loads((run.path / "run.json").read_text())
    assert info["status"] == "running"
    assert info["seed"] == recipe.seed
    assert len(info["recipe_sha256"]) == 64
    assert set(info["versions"]) >= {"lap", "python", "torch"}


def test_the_same_recipe_goes_on(recipe, tmp_path):
    run = open_run(tmp_path, "first", recipe)
    run.update(step=7)
    unlock(run)
    assert open_run(tmp_path, "first", recipe).info["step"] == 7


def test_another_recipe_may_take_the_name_of_a_run_without_a_step(recipe, tmp_path):
    """A typo in --data must not block the name; but what is being prepared, or has more in it, stays."""
    other = tiny_recipe(tmp_path / "text.txt", train={"steps": 11})
    run = open_run(tmp_path, "first", recipe)
    run.update(status="failed")
    with pytest.raises(UsageError, match="trained by another process"):
        open_run(tmp_path, "first", other)
    unlock(run)
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="another recipe"):
        open_run(tmp_path, "first", other)
    (run.path / "notes.txt").unlink()
    again = open_run(tmp_path, "first", other)
    assert (again.recipe, again.info["status"]) == (other, "running")


def test_a_place_that_cannot_be_is_one_sentence(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another --runs-dir"):
        open_run(tmp_path / "file" / "runs", "first", recipe)


def test_another_recipe_is_refused_with_the_differing_keys(recipe, tmp_path):
    run = open_run(tmp_path, "first", recipe)
    run.metrics.write_text('{"step": 1, "loss": 5.0}\n')
    unlock(run)
    other = tiny_recipe(tmp_path / "text.txt", train={"steps": 11}, seed=3)
    with pytest.raises(UsageError) as refused:
        open_run(tmp_path, "first", other)
    message = str(refused.value)
    assert "train.steps: 10 in the run, 11 now" in message
    assert "seed: 0 in the run, 3 now" in message
    assert "--name" in message
    assert "--fresh" in message
    assert load_recipe(tmp_path / "first" / "recipe.yaml") == recipe


def test_another_number_of_workers_goes_on(tmp_path):
    """They change no batch, and the next machine may have other cores."""
    run = open_run(tmp_path, "images", image_recipe(data={"workers": 1}))
    (run.checkpoints / "step-000001").mkdir(parents=True)
    unlock(run)
    again = open_run(tmp_path, "images", image_recipe(data={"workers": 2}))
    assert {**again.info, "updated": None} == {**run.info, "updated": None}
    unlock(again)
    with pytest.raises(UsageError, match=r"data\.split_seed"):
        open_run(tmp_path, "images", image_recipe(data={"workers": 2, "split_seed": 7}))


def test_fresh_moves_the_old_run_aside(recipe, tmp_path):
    for number in (1, 2):
        run = open_run(tmp_path, "first", recipe, fresh=number > 1)
        if number > 1:
            move_into_place(run)
        run.update(step=number)
        unlock(run)
    move_into_place(open_run(tmp_path, "first", recipe, fresh=True))
    assert [read_run(tmp_path / name).info["step"] for name in ("first.old-1", "first.old-2", "first")] == [1, 2, 0]


def test_an_old_run_stays_in_its_place_until_the_new_one_is_ready(recipe, tmp_path):
    old = open_run(tmp_path, "first", recipe)
    old.update(step=7)
    unlock(old)
    other = tiny_recipe(tmp_path / "text.txt", train={"steps": 11})
    new = open_run(tmp_path, "first", other, fresh=True)
    assert read_run(tmp_path / "first").info["step"] == 7
    with pytest.raises(UsageError, match="being trained by another process"):  # its lock is held already
        open_run(tmp_path, "first", recipe)
    assert discard_untrained(new)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    assert open_run(tmp_path, "first", recipe).info["step"] == 7


def test_a_new_run_without_a_step_gives_the_place_back(recipe, tmp_path):
    old = open_run(tmp_path, "first", recipe)
    old.update(step=7)
    unlock(old)
    for has_step in (False, True):
        new = open_run(tmp_path, "first", recipe, fresh=True)
        move_into_place(new)
        new.metrics.write_text('{"step": 1, "loss": 5.0}\n' if has_step else '{"step": 0, "validation_loss": 5.0}\n')
        assert discard_untrained(new) is not has_step
        assert read_run(tmp_path / "first").info["step"] == (0 if has_step else 7)
        unlock(new)


def test_an_old_run_that_is_trained_under_its_new_name_is_left_there(recipe, tmp_path):
    unlock(open_run(tmp_path, "first", recipe))
    new = open_run(tmp_path, "first", recipe, fresh=True)
    move_into_place(new)
    old = open_run(tmp_path, "first.old-1", recipe)
    assert not discard_untrained(new)
    old.update(step=7)
    assert read_run(tmp_path / "first.old-1").info["step"] == 7


def test_two_processes_cannot_train_one_run(recipe, tmp_path):
    first = open_run(tmp_path, "first", recipe)
    with pytest.raises(UsageError, match=f"another process .process {os.getpid()} on {socket.gethostname()}"):
        open_run(tmp_path, "first", recipe)
    unlock(first)
    open_run(tmp_path, "first", recipe)


def test_a_lock_that_was_waited_for_is_of_the_folder_that_is_there_now(recipe, tmp_path, monkeypatch):
    """Between opening the lock file and locking it, the folder is replaced by a new one that is being trained."""
    old = open_run(tmp_path, "first", recipe)
    unlock(old)
    real, replaced = files.lock_file, []

    def replace_first(handle, **options):
        if not replaced:
            replaced.append(True)
            new = open_run(tmp_path, "first", recipe, fresh=True)
            move_into_place(new)
            replaced.append(new)
        return real(handle, **options)

    monkeypatch.setattr(opening, "lock_file", replace_first)
    with pytest.raises(UsageError, match="being trained by another process"):
        open_run(tmp_path, "first", recipe)


def test_a_run_whose_folder_was_replaced_by_hand_writes_no_more(recipe, tmp_path):
    run = open_run(tmp_path, "first", recipe)
    run.path.rename(tmp_path / "elsewhere")
    other = open_run(tmp_path, "first", recipe)
    with pytest.raises(LapError, match="was moved, replaced or removed"):
        run.update(step=9)
    assert read_run(other.path).info["step"] == 0


def test_what_a_launch_began_is_resumed_when_it_starts_again(recipe, tmp_path):
    """torchrun repeats the whole command, --fresh included, when a rank has died; rank 0 may be on another machine."""
    unlock(open_run(tmp_path, "first", recipe))
    run = open_run(tmp_path, "first", recipe, fresh=True, launches=["a on here", "a on there"])
    move_into_place(run)
    run.update(step=3)
    unlock(run)
    again = open_run(tmp_path, "first", recipe, fresh=True, launches=["a on there"], restarted=True)
    assert again.info["step"] == 3
    unlock(again)
    new = open_run(tmp_path, "first", recipe, fresh=True, launches=["a on here"])  # the same name, but a first start
    assert new.info["step"] == 0
    discard_untrained(new)
    assert open_run(tmp_path, "first", recipe, fresh=True, launches=["b on here"], restarted=True).info["step"] == 0


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 200, "sp ace"])
def test_names_that_would_leave_the_folder_are_refused(recipe, tmp_path, name):
    with pytest.raises(UsageError, match="is not a valid run name"):
        open_run(tmp_path / "runs", name, recipe)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_no_run_is_refused(recipe, tmp_path):
    (tmp_path / "first").mkdir()
    with pytest.raises(UsageError, match="not a run directory"):
        open_run(tmp_path, "first", recipe)


@pytest.mark.slow
def test_a_forked_worker_does_not_hold_the_lock(tmp_path, recipe):
    """Workers that read data outlive a killed run for a few seconds; the next start must not wait for them."""
    import multiprocessing
    import time

    run = open_run(tmp_path, "run", recipe)
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    worker = fork.Process(target=lambda: runs.set() or time.sleep(30))
    worker.start()
    try:
        assert runs.wait(60)
        with pytest.raises(UsageError, match="trained by another process"):
            open_run(tmp_path, "run", recipe)
        unlock(run)
        open_run(tmp_path, "run", recipe)
    finally:
        worker.kill()
