"""Ranks train together only on the same data: two machines may have different copies of a file."""

import shutil

import pytest
from support import ranks, start_lap, tiny_recipe, write_text

from lapcli.recipe import recipe_to_yaml


def start_ranks(command, recipes, homes, runs, caches, *options):
    """One rank per home folder, as on separate machines; returns the output and exit code of each."""
    given = ["--runs-dir", str(runs), "--name", "run", *options]
    started = [
        start_lap(command, str(recipe), *given, cache=cache, environment={**rank, "HOME": str(home)})
        for rank, recipe, home, cache in zip(ranks(len(homes)), recipes, homes, caches, strict=True)
    ]
    return [command.result() for command in started]


@pytest.fixture
def homes(tmp_path):
    found = [tmp_path / "a", tmp_path / "b"]
    for home in found:
        home.mkdir()
    return found


def other_text(home):
    text = write_text(home / "text.txt")
    text.write_text(text.read_text().replace("cat", "cow"))


def refused(results, words):
    for result in results:
        assert result.returncode == 2, result.stderr
    said = [line for line in results[0].stderr.splitlines() if line.startswith("lap: ")]
    assert len(said) == 1
    assert said[0].startswith("lap: rank 1 on ")
    assert words in said[0]
    assert "same files to every machine" in said[0]
    assert "Traceback" not in results[1].stderr


def test_different_text_is_refused_and_identical_text_is_accepted(homes, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(recipe_to_yaml(tiny_recipe("~/text.txt", train={"steps": 2}, validation={"tokens": 64})))
    caches = [tmp_path / "cache a", tmp_path / "cache b"]
    write_text(homes[0] / "text.txt")
    other_text(homes[1])
    refused(start_ranks("train", [recipe] * 2, homes, tmp_path / "runs", caches), "differs from rank 0")
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()
    shutil.copy(homes[0] / "text.txt", homes[1])
    for result in start_ranks("train", [recipe] * 2, homes, tmp_path / "runs", caches):
        assert result.returncode == 0, result.stderr
