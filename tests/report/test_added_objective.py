"""Runs of an objective from another package are in reports and sweeps with the metrics of its recipe type."""

import json
import os
import sys

import pytest
from report_support import write_run
from support import ROOT, run_process

PACKAGE = """
from typing import ClassVar, Literal

from lapcli.recipe.vision import ClassificationRecipe


class TwinsRecipe(ClassificationRecipe):
    objective: Literal["twins"]
    metrics: ClassVar = {"validation_agreement": ("fraction", "higher")}
    expected_scores = validated_scores = ()


def register(extensions):
    extensions.add("objective", TwinsRecipe)
"""
NAMES = {"twins_0L": 0, "twins_2L": 2, "half": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The package as pip would leave it, and three of its runs, one of them interrupted."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "twins.py").write_text(PACKAGE)
    (folder / "twins-1.0.dist-info").mkdir()
    (folder / "twins-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: twins\nVersion: 1.0\n")
    (folder / "twins-1.0.dist-info" / "entry_points.txt").write_text("[lap.plugins]\ntwins = twins\n")
    for name, heads in NAMES.items():
        told = {"status": "interrupted"} if name == "half" else {"validation": {"agreement": 0.5 + heads / 10}}
        path = write_run(folder / "runs", name, heads=heads, **told)
        for file in (path / "recipe.yaml", path / "run.json"):
            file.write_text(file.read_text().replace("classification", "twins"))
    return folder


def lap(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "LAP_RUNS": "runs"}
    words = [sys.executable, "-m", "lapcli", *arguments]
    return run_process(words, cwd=folder, env=environment, capture_output=True, text=True)


def test_in_a_table_and_on_the_page(folder):
    done = lap(folder, "report", "--format", "json")
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(done.stdout)
    cells = {row["row"]: row["cells"]["validation_agreement"]["mean"] for row in table["rows"]}
    assert cells == {"0": 0.5, "2": 0.7, "4": None}
    done = lap(folder, "report", "half", "--format", "json")
    assert "row 4, validation agreement (%)" in done.stderr  # what the recipe says it has, as a gap
    done = lap(folder, "report", "--format", "html")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (folder / "runs" / "report_figures").glob("*agreement-by-rows.svg")]


@pytest.mark.long
def test_a_search_may_choose_by_what_it_validates(folder):
    recipe = (ROOT / "recipes" / "vit_digits.yaml").read_text().replace("objective: classification", "objective: twins")
    (folder / "twins.yaml").write_text(recipe)
    text = "cells: [{recipe: twins.yaml, tune: {over: {seed: [0, 1]}, by: BY}}]"
    (folder / "sweep.yaml").write_text(text.replace("BY", "validation_agreement"))
    done = lap(folder, "sweep", "sweep.yaml", "--slurm")
    assert done.returncode == 0, done.stderr
    assert "twins-tune-seed1" in done.stdout
    (folder / "sweep.yaml").write_text(text.replace("BY", "validation_top1"))
    done = lap(folder, "sweep", "sweep.yaml", "--slurm")
    assert done.returncode == 2
    assert "validation_top1" in done.stderr
    assert "validation_agreement" in done.stderr
