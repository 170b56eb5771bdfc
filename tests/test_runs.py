"""A run directory is never overwritten and never half there."""

import json

import pytest
from image_support import image_recipe
from support import tiny_recipe

from lapcli.recipe import load_recipe
from lapcli.runs import newest_run, open_run, read_run
from lapcli.runtime.errors import UsageError


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
    open_run(tmp_path, "first", recipe).update(step=7)
    assert open_run(tmp_path, "first", recipe).info["step"] == 7


def test_another_recipe_may_take_the_name_of_a_run_without_a_step(recipe, tmp_path):
    """A typo in --data must not block the name; but what is being prepared, or has more in it, stays."""
    other = tiny_recipe(tmp_path / "text.txt", train={"steps": 11})
    run = open_run(tmp_path, "first", recipe)
    run.update(status="failed")
    run.lock()
    with pytest.raises(UsageError, match="trained by another process"):
        open_run(tmp_path, "first", other)
    run.unlock()
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
    open_run(tmp_path, "first", recipe).metrics.write_text('{"step": 1, "loss": 5.0}\n')
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
    assert open_run(tmp_path, "images", image_recipe(data={"workers": 2})).info == run.info
    with pytest.raises(UsageError, match=r"data\.split_seed"):
        open_run(tmp_path, "images", image_recipe(data={"workers": 2, "split_seed": 7}))


def test_fresh_moves_the_old_run_aside(recipe, tmp_path):
    for number in (1, 2):
        open_run(tmp_path, "first", recipe).update(step=number)
        open_run(tmp_path, "first", recipe, fresh=True)
    assert [read_run(tmp_path / name).info["step"] for name in ("first.old-1", "first.old-2", "first")] == [1, 2, 0]


def test_two_processes_cannot_train_one_run(recipe, tmp_path):
    first, second = (open_run(tmp_path, "first", recipe) for _ in range(2))
    first.lock()
    with pytest.raises(UsageError, match="another process"):
        second.lock()
    first.unlock()
    second.lock()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 200, "sp ace"])
def test_names_that_would_leave_the_folder_are_refused(recipe, tmp_path, name):
    with pytest.raises(UsageError, match="cannot name a run"):
        open_run(tmp_path / "runs", name, recipe)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_no_run_is_refused(recipe, tmp_path):
    (tmp_path / "first").mkdir()
    with pytest.raises(UsageError, match="not a run directory"):
        open_run(tmp_path, "first", recipe)


def test_the_newest_finished_run_of_a_kind(recipe, tmp_path):
    with pytest.raises(UsageError, match="no finished run"):
        newest_run(tmp_path, {"language_model"})
    for name in ("a", "b", "c"):
        open_run(tmp_path, name, recipe)
    read_run(tmp_path / "b").update(status="finished")
    read_run(tmp_path / "c").update(status="interrupted")
    assert newest_run(tmp_path, {"language_model"}).name == "b"
    with pytest.raises(UsageError):
        newest_run(tmp_path, {"classification"})


def test_a_forked_worker_does_not_hold_the_lock(tmp_path, recipe):
    """Workers that read data outlive a killed run for a few seconds; the next start must not wait for them."""
    import multiprocessing
    import time

    run = open_run(tmp_path, "run", recipe)
    run.lock()
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    worker = fork.Process(target=lambda: runs.set() or time.sleep(30))
    worker.start()
    try:
        assert runs.wait(60)
        with pytest.raises(UsageError, match="trained by another process"):
            open_run(tmp_path, "run", recipe).lock()
        run.unlock()
        open_run(tmp_path, "run", recipe).lock()
    finally:
        worker.kill()
