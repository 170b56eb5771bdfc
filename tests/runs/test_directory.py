"""A run is read as it was written or not at all, and shows what has become of it. Reading changes nothing."""

import json
import os
import shutil
import time

import pytest
from support import exit_code, process, tiny_recipe

from lapcli.recipe import recipe_from_dict, recipe_to_dict, values_hash
from lapcli.runs import find_run, newest_run, open_run, read_run, read_summary, write_summary
from lapcli.runs.directory import LONG_SILENT
from lapcli.runs.opening import unlock
from lapcli.runtime.errors import DataError, UsageError


@pytest.fixture
def recipe(tmp_path):
    return tiny_recipe(tmp_path / "text.txt")


@pytest.fixture
def run(recipe, tmp_path):
    run = open_run(tmp_path, "first", recipe)
    run.update(status="interrupted", step=3)
    unlock(run)
    return run


def finished(runs, name, recipe, **changes):
    run = open_run(runs, name, recipe)
    run.update(status="finished", **changes)
    unlock(run)
    return run


def test_one_changed_digit_of_the_recipe_is_named(run):
    file = run.path / "recipe.yaml"
    text = file.read_text()
    file.write_text(text.replace("batch: 8", "batch: 9", 1))
    with pytest.raises(DataError, match=r"recipe\.yaml was edited or damaged"):
        read_run(run.path)
    file.write_text(text)
    assert read_run(run.path).recipe == run.recipe
    file.unlink()
    with pytest.raises(DataError, match=r"recipe\.yaml cannot be read"):
        read_run(run.path)


def test_a_recipe_of_version_0_1_is_verified_by_its_values(run):
    """There `run.json` has no hash of the file, and neither a checksum of itself."""
    info = {name: value for name, value in run.info.items() if name not in ("recipe_file_sha256", "host", "pid")}
    file = run.path / "recipe.yaml"
    (run.path / "run.json").write_text(json.dumps({**info, "recipe_sha256": values_hash(file.read_text())}))
    file.write_text("# a remark\n" + file.read_text())
    assert read_run(run.path).recipe == run.recipe
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(DataError, match=r"recipe\.yaml was edited or damaged"):
        read_run(run.path)


@pytest.mark.parametrize("damage", ['"step": 4', '"step": "3"', '"steq": 3', '"step": 3, "x": 1', '"step" 3'])
def test_a_changed_run_json_is_named(run, damage):
    file = run.path / "run.json"
    file.write_text(file.read_text().replace('"step": 3', damage))
    with pytest.raises(DataError, match=r"run\.json is (damaged|not what was written)"):
        read_run(run.path)


@pytest.mark.parametrize("key", ["format", "sha256"])
def test_a_file_without_half_of_its_check_is_not_taken_for_one_of_version_0_1(run, key):
    file = run.path / "run.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != key}))
    with pytest.raises(DataError, match="sha256 differs"):
        read_run(run.path)


def test_a_changed_summary_is_named(run):
    assert read_summary(run) == {}
    write_summary(run, {"end": {"validation_loss": 1.25}})
    assert read_summary(run) == {"end": {"validation_loss": 1.25}}
    (run.path / "summary.json").write_text((run.path / "summary.json").read_text().replace("1.25", "1.15"))
    with pytest.raises(DataError, match=r"summary\.json is not what was written"):
        read_summary(run)


def test_the_newest_finished_run_of_a_kind(recipe, tmp_path):
    with pytest.raises(UsageError, match="no finished run"):
        newest_run(tmp_path, {"language_model"})
    for name, status in (("a", "running"), ("b", "finished"), ("c", "interrupted")):
        run = open_run(tmp_path, name, recipe)
        run.update(status=status)
    assert newest_run(tmp_path, {"language_model"}).name == "b"
    with pytest.raises(UsageError):
        newest_run(tmp_path, {"classification"})


def test_the_newest_run_stays_the_newest_when_another_is_copied(recipe, tmp_path, monkeypatch):
    for name, when in (("a", "2026-01-01T12:00:00+0200"), ("b", "2026-01-01T11:00:00+0000")):
        monkeypatch.setattr("lapcli.runs.directory.now", lambda when=when: when)
        finished(tmp_path, name, recipe)
    shutil.copytree(tmp_path / "a", tmp_path / "copied")
    assert newest_run(tmp_path, {"language_model"}).name == "b"


def test_a_damaged_run_is_not_passed_over_for_an_older_one(recipe, tmp_path):
    for name in ("a", "b"):
        finished(tmp_path, name, recipe)
    (tmp_path / "b" / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"b/run\.json is damaged .*--run"):
        newest_run(tmp_path, {"language_model"})
    assert find_run(tmp_path, "a", {"language_model"}).name == "a"


def _open_and_die(folder, values):
    run = open_run(folder, "first", recipe_from_dict(values))
    run.update(status="running", step=2)
    os._exit(1)  # as after a kill: nothing is cleaned up


@pytest.fixture
def killed(recipe, tmp_path):
    child = process(_open_and_die, tmp_path, recipe_to_dict(recipe))
    child.start()
    assert exit_code(child) == 1
    return tmp_path / "first"


def test_a_killed_run_is_interrupted(recipe, killed, tmp_path):
    before = (killed / "run.json").read_bytes()
    info = json.loads(before)
    assert info["status"] == "running"
    assert read_run(killed).status == "interrupted"
    with pytest.raises(UsageError, match="is interrupted, not finished"):
        find_run(tmp_path, "first", {"language_model"})
    assert (killed / "run.json").read_bytes() == before
    again = open_run(tmp_path, "first", recipe)
    assert read_run(killed).status == "running"
    unlock(again)


def test_where_nobody_can_lock_the_process_tells(killed, monkeypatch):
    monkeypatch.setattr("lapcli.runs.directory.is_locked", lambda path: None)
    run = read_run(killed)
    assert run.status == "interrupted"
    run.update(pid=os.getpid())
    assert read_run(killed).status == "running"


def test_a_run_of_another_machine_is_interrupted_when_it_has_long_been_silent(killed):
    run = read_run(killed)
    run.update(host="elsewhere")
    assert read_run(killed).status == "running"
    (killed / "metrics.jsonl").write_text("")
    long_ago = time.time() - LONG_SILENT - 60
    os.utime(killed / "run.json", (long_ago, long_ago))
    assert read_run(killed).status == "running"  # its metrics were written just now
    os.utime(killed / "metrics.jsonl", (long_ago, long_ago))
    assert read_run(killed).status == "interrupted"


def test_missing_parts_of_a_finished_run(recipe, tmp_path):
    run = finished(tmp_path, "first", recipe, step=10)
    assert [path.name for path in run.missing_parts()] == ["metrics.jsonl", "summary.json", "step-000010"]
    run.metrics.write_text("")
    write_summary(run, {})
    (run.checkpoints / "step-000010").mkdir(parents=True)
    assert run.missing_parts() == []
