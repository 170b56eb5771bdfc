"""`--fresh` in real processes: a run that is being trained, or that nothing can replace yet, keeps its place."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support import LOG, exit_code, ranks, start_child, tiny_recipe, wait_until, write_text

from lapcli.runs import read_run
from lapcli.training import checkpoint


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def recipe(text):
    return tiny_recipe(text, train={"steps": 2}, validation={"every": None}, checkpoint={"every": None})


@pytest.fixture
def other(text):
    """Not the same run: another seed."""
    return tiny_recipe(text, train={"steps": 2}, validation={"every": None}, checkpoint={"every": None}, seed=1)


@pytest.fixture
def trained(recipe, tmp_path, shared_cache):
    """A folder with a finished run."""
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    return tmp_path


def content(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def assert_whole(run: Path, seed: int) -> None:
    """Finished, with the recipe, the record and the weights of one training."""
    found = read_run(run)
    assert (found.status, found.recipe.seed, found.info["seed"]) == ("finished", seed, seed)
    (step,) = checkpoint.steps_in(found.checkpoints)
    saved = checkpoint.read(found.checkpoints / f"step-{step:06d}")
    assert saved.weights_sha256 == found.info["weights_sha256"]
    assert saved.state["seed"] == seed


def _wait_in_update(folder):
    """Says that the first update has come, and takes it when it is told to."""
    from lapcli.training.optimizers import Optimizers

    before = Optimizers.step

    def update(self):
        Path(folder, "in update").touch()
        while not Path(folder, "go on").exists():
            time.sleep(0.02)
        before(self)

    Optimizers.step = update


def _die_between_the_renames():
    """SIGKILL to ourselves when the old run has been moved aside and the new one has not taken its place."""
    rename = os.rename

    def die(source, target, **options):
        if Path(source).name == ".run.new":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target, **options)

    os.rename = die


def _fail_in_the_first_update():
    from lapcli.training.optimizers import Optimizers

    def update(self):
        raise MemoryError("no more memory")

    Optimizers.step = update


def test_a_run_that_is_being_trained_is_not_moved_aside(recipe, other, tmp_path, shared_cache):
    first = start_child(recipe, tmp_path / "runs", shared_cache, _wait_in_update, str(tmp_path))
    wait_until((tmp_path / "in update").exists)
    assert exit_code(start_child(other, tmp_path / "runs", shared_cache, fresh=True)) == 2
    said = (tmp_path / "runs" / LOG).read_text()
    assert f"is being trained by another process (process {first.pid} on" in said
    (tmp_path / "go on").touch()
    assert exit_code(first) == 0
    assert_whole(tmp_path / "runs" / "run", seed=0)
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == ["run"]


def test_a_run_keeps_its_place_if_the_data_of_the_new_one_is_not_found(trained, text, shared_cache):
    before = content(trained / "run")
    nowhere = tiny_recipe(text.with_name("nowhere.txt"))
    assert exit_code(start_child(nowhere, trained, shared_cache, fresh=True)) == 2
    said = (trained / LOG).read_text()
    assert "nowhere.txt" in said
    assert "still holds the previous run" in said
    assert content(trained / "run") == before
    assert sorted(path.name for path in trained.iterdir()) == [LOG, "run"]


def test_a_run_gets_its_place_back_if_the_first_step_fails(trained, other, shared_cache):
    before = content(trained / "run")
    assert exit_code(start_child(other, trained, shared_cache, _fail_in_the_first_update, fresh=True)) == 1
    assert content(trained / "run") == before
    assert sorted(path.name for path in trained.iterdir()) == [LOG, "run"]


@pytest.mark.parametrize("again", ["the old recipe", "the new recipe", "the new recipe, fresh"])
def test_a_kill_between_the_renames_is_repaired_by_the_next_start(trained, recipe, other, shared_cache, again):
    child = start_child(other, trained, shared_cache, _die_between_the_renames, fresh=True)
    assert exit_code(child) == -signal.SIGKILL
    assert not (trained / "run").exists()
    before = content(trained / "run.old-1")
    next_start = recipe if again == "the old recipe" else other
    code = exit_code(start_child(next_start, trained, shared_cache, fresh=again.endswith("fresh")))
    assert code == (2 if again == "the new recipe" else 0)  # refused: that name has a run of another recipe
    assert content(trained / ("run.old-1" if again.endswith("fresh") else "run")) == before
    assert_whole(trained / "run", seed=1 if again.endswith("fresh") else 0)
    hidden = [path.name for path in trained.iterdir() if path.name.startswith(".")]
    assert hidden == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_new_run_takes_the_place_of_the_old_one(trained, other, shared_cache, processes):
    before = content(trained / "run")
    children = [start_child(other, trained, shared_cache, fresh=True, environment=rank) for rank in ranks(processes)]
    assert [exit_code(child) for child in children] == [0] * processes, (trained / LOG).read_text()
    assert content(trained / "run.old-1") == before
    assert_whole(trained / "run", seed=1)
    info = json.loads((trained / "run" / "run.json").read_text())
    assert (info["name"], info["moved_aside"]) == ("run", "run.old-1")
