"""What version 0.1 made stays usable: finished and killed runs, a sweep's state, results and recipes."""

import json
import os
import shutil
import time

import pytest
from support import ROOT, run_main

from lapcli.recipe import load_recipe, loading, recipe_hash, values_hash
from lapcli.recipe.schema import LanguageModelRecipe
from lapcli.recipe.section import added
from lapcli.recipe.sweep import load_sweep
from lapcli.runs import changes, read_run
from lapcli.runs.directory import LONG_SILENT
from lapcli.sweep.state import commands_left, progress
from lapcli.sweep.sweep import sweep_from_file

MADE = ROOT / "tests" / "made_by_0_1"
HASHES = json.loads((MADE / "recipes" / "hashes.json").read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of all that 0.1 made, as the current folder; nobody has written to its runs for long."""
    shutil.copytree(MADE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "copy" / "cache"))
    long_ago = time.time() - LONG_SILENT - 60
    for file in (tmp_path / "copy" / "trained").rglob("*"):
        os.utime(file, (long_ago, long_ago))
    return tmp_path / "copy"


@pytest.mark.parametrize("name", HASHES)
def test_a_recipe_keeps_its_hash(name):
    """If this fails, a key of the schema was added without `added(default)`, renamed, or removed."""
    path = MADE / "recipes" / f"{name}.yaml"
    assert recipe_hash(load_recipe(path)) == HASHES[name]
    assert values_hash(path.read_text()) == HASHES[name]


def test_a_finished_run_gives_its_results(folder, capsys):
    run = folder / "trained" / "tiny-seed0"
    before = (run / "run.json").read_bytes()
    columns = ["--columns", "bpb,cosine_similarity"]
    code, out, err = run_main(capsys, "report", "--runs-dir", "trained", "--format", "json", *columns)
    assert code == 0, err
    told = json.loads((run / "eval" / "step-000006_bpb_limit4_harness-d7151d_3c29dd19.json").read_text())
    (table,) = json.loads(out)
    cells = table["rows"][0]["cells"]
    assert cells["bpb [limit 4]"]["mean"] == pytest.approx(told["tasks"]["bpb"]["value"], rel=1e-9)
    layers = json.loads((run / "analysis" / "cossim.json").read_text())["runs"][0]["layers"]
    assert cells["cossim.cosine_similarity"]["mean"] == pytest.approx(layers[-1]["cosine_similarity"], rel=1e-9)
    code, out, err = run_main(capsys, "train", "tiny.yaml", "--name", "tiny-seed0", "--runs-dir", "trained", "--json")
    assert code == 0, err
    assert json.loads(out)["weights_sha256"] == json.loads(before)["weights_sha256"]
    assert (run / "run.json").read_bytes() == before  # it was read, not trained


def cells_of(folder):
    return sweep_from_file(load_sweep(folder / "sweep.yaml"), []).grids[0].cells()


def test_a_sweep_knows_its_cells(folder):
    first, second = cells_of(folder)
    assert (progress(first, folder / "trained").status, commands_left(first, folder / "trained")) == ("finished", [])
    assert (progress(second, folder / "trained").status, progress(second, folder / "trained").step) == (
        "interrupted",
        2,
    )


class LaterRecipe(LanguageModelRecipe):
    """The schema of a later version, which has one key more."""

    later: int = added(5)


class ForgottenRecipe(LanguageModelRecipe):
    """The same, but nobody has marked the key."""

    later: int = 5


@pytest.mark.parametrize("schema", [LaterRecipe, ForgottenRecipe])
def test_a_key_that_is_added_later_changes_no_run_and_no_sweep(folder, monkeypatch, schema):
    monkeypatch.setattr(loading, "RECIPES", {"language_model": schema})
    run = read_run(folder / "trained" / "tiny-seed0")
    assert run.recipe.later == 5
    recipe = load_recipe("tiny.yaml")
    assert (recipe_hash(recipe) == run.info["recipe_sha256"]) is (schema is LaterRecipe)
    assert changes(run, recipe) == []  # by their keys they agree, whatever the hash
    assert progress(cells_of(folder)[0], folder / "trained").status == "finished"
    other = load_recipe("tiny.yaml", ["later=6"])
    assert recipe_hash(other) != recipe_hash(recipe)
    assert changes(run, other) == [("later", 5, 6)]
