"""What a killed process leaves in a run is removed by the next command on it; what a living one writes is not."""

import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest
from support import run_main, start_child, start_process, tiny_recipe, train_here, write_text
from sweep_support import write_recipe

from lapcli.kinds.opening import find_checkpoint
from lapcli.runs import named_run, open_run, runs_in
from lapcli.runs.opening import unlock
from lapcli.runtime import files
from lapcli.runtime.errors import LapError, UsageError
from lapcli.training import checkpoint

PAUSED = """
import sys, time
from pathlib import Path
from lapcli.runtime.files import atomic_file
with atomic_file(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print(temporary.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def recipe(tmp_path):
    return tiny_recipe(write_text(tmp_path / "text.txt"), train={"steps": 2}, checkpoint={"every": 1, "keep": 1})


def test_half_written_files_are_removed_once_their_process_is_gone(recipe, tmp_path):
    unlock(run := open_run(tmp_path / "runs", "run", recipe))
    (run.path / "eval").mkdir()
    with start_process(
        [sys.executable, "-c", PAUSED, str(run.path / "eval" / "result.json")], stdout=subprocess.PIPE, text=True
    ) as writer:
        name = writer.stdout.readline().strip()
        named_run(tmp_path / "runs", "run")
        assert (run.path / "eval" / name).read_text() == "half"
        writer.send_signal(signal.SIGKILL)
    named_run(tmp_path / "runs", "run")
    assert list((run.path / "eval").iterdir()) == []


def test_nothing_is_removed_from_a_folder_that_is_not_a_run(tmp_path):
    theirs = tmp_path / "runs" / "photos" / "2024" / ".libpng.so.16"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("somebody's own file, with a name as our temporary files have")
    with pytest.raises(UsageError, match="is not a run directory"):
        named_run(tmp_path / "runs", "photos")
    assert theirs.is_file()


@pytest.mark.parametrize("leftover", [".removing-step-000001", ".writing-step-000003"])
def test_checkpoints_on_their_way_belong_to_who_trains_the_run(recipe, tmp_path, leftover):
    run = open_run(tmp_path / "runs", "run", recipe)
    (run.checkpoints / leftover).mkdir(parents=True)
    (run.checkpoints / leftover / "model.safetensors").write_text("")
    named_run(tmp_path / "runs", "run")
    assert (run.checkpoints / leftover).is_dir()
    unlock(run)
    named_run(tmp_path / "runs", "run")
    assert not (run.checkpoints / leftover).exists()


def test_checkpoints_of_a_run_on_another_machine_are_left_alone(recipe, tmp_path):
    """Its lock may be invisible here, as on NFS with local locks."""
    run = open_run(tmp_path / "runs", "run", recipe)
    run.update(host="another-machine")
    unlock(run)
    (run.checkpoints / ".writing-step-000003").mkdir(parents=True)
    assert named_run(tmp_path / "runs", "run").status == "running"
    assert (run.checkpoints / ".writing-step-000003").is_dir()


def test_a_reader_leaves_the_files_of_a_save_and_of_an_export_alone(recipe, tmp_path, monkeypatch):
    """safetensors replaces the temporary file by one of its own, which has no lock."""
    sort_metadata = checkpoint._sort_metadata

    def read_meanwhile(path):
        named_run(tmp_path / "runs", "run")
        sort_metadata(path)

    monkeypatch.setattr(checkpoint, "_sort_metadata", read_meanwhile)
    run = train_here(recipe, tmp_path / "runs")
    assert run.is_finished
    file = run.path / "export" / ".writing-timm-1" / f".model.safetensors.1.{os.getpid()}"
    file.parent.mkdir(parents=True)
    file.write_text("")
    named_run(tmp_path / "runs", "run")
    assert file.exists()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_every_file_of_a_run_has_the_permissions_of_the_umask(recipe, tmp_path, mask):
    """Checkpoints too, which safetensors writes for the owner alone: a colleague may evaluate them."""
    before = os.umask(mask)
    try:
        train_here(recipe, tmp_path / "runs")
    finally:
        os.umask(before)
    found = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert found == {0o666 & ~mask}


def _open_at_once(barrier, answers, runs, recipe):
    barrier.wait()
    try:
        run = open_run(runs, "run", recipe)
    except LapError as error:
        answers.put(str(error))
    except BaseException as error:
        answers.put(f"not a sentence: {error!r}")
    else:
        answers.put("opened")
        barrier.wait()  # until all have tried
        unlock(run)
        return
    barrier.wait()


@pytest.mark.slow
def test_of_several_starts_of_one_new_name_one_trains_it(recipe, tmp_path):
    fork = multiprocessing.get_context("fork")
    for attempt in range(12):
        barrier, answers = fork.Barrier(3), fork.Queue()
        runs = tmp_path / f"runs-{attempt}"
        children = [fork.Process(target=_open_at_once, args=(barrier, answers, runs, recipe)) for _ in range(3)]
        for child in children:
            child.start()
        said = sorted(answers.get() for _ in children)
        for child in children:
            child.join()
        assert said.count("opened") == 1, said
        assert sum("is being trained by another process" in text for text in said) == 2, said
        assert [path.name for path in runs.iterdir()] == ["run"]


@pytest.mark.parametrize("change", [{"data": {"train": "nowhere.txt"}}, {"schedule": {"warmup": 500}}])
def test_a_start_that_fails_before_the_first_step_leaves_no_run(tmp_path, capsys, change):
    recipe = write_recipe(tmp_path, **change)
    runs = tmp_path / "runs"
    code, _, err = run_main(capsys, "train", str(recipe), "--runs-dir", str(runs))
    assert (code, err.count("lap: ")) == (2, 1), err
    assert not runs.exists() or list(runs.iterdir()) == []


def test_an_error_in_the_first_update_leaves_no_run(recipe, tmp_path, shared_cache):
    child = start_child(recipe, tmp_path / "runs", shared_cache, _fail_in_the_first_update)
    child.join()
    assert child.exitcode not in (0, None)
    assert runs_in(tmp_path / "runs") == []


def _fail_in_the_first_update():
    from lapcli.training.optimizers import Optimizers

    def update(self):
        raise MemoryError("no more memory")

    Optimizers.step = update


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_run_folder_that_goes_away_under_training_is_one_sentence(recipe, tmp_path, monkeypatch, how):
    runs = tmp_path / "runs"

    def fault_point(point):
        if point == "after rename":
            shutil.rmtree(runs / "run") if how == "removed" else (runs / "run").rename(runs / "other")

    monkeypatch.setattr(checkpoint, "fault_point", fault_point)
    with pytest.raises(LapError, match="was moved, replaced or removed while it was being trained"):
        train_here(recipe, runs)
    assert [path.name for path in runs.iterdir()] == ([] if how == "removed" else ["other"])


def test_a_checkpoint_that_is_pruned_while_it_is_chosen_is_not_missed(recipe, tmp_path, monkeypatch):
    train_here(recipe, tmp_path / "runs")
    run = named_run(tmp_path / "runs", "run")
    run.info["status"] = "running"
    newest = run.checkpoints / "step-000002"
    older = run.checkpoints / "step-000001"
    shutil.copytree(newest, older)
    listed = checkpoint.steps_in
    answers = iter([[1]])
    monkeypatch.setattr(checkpoint, "steps_in", lambda folder: next(answers, None) or listed(folder))
    files.remove(older)  # between the list and the reading
    assert find_checkpoint(run, "last").step == 2


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_for_user(tmp_path / "pipe", "text")
    assert os.read(reader, 100) == b"text"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)
    with pytest.raises(UsageError, match="is a folder"):
        files.write_for_user(tmp_path, "text")
