"""Shell completion, called as a shell calls it: names of runs and recipes, without torch."""

import pytest
from support import ROOT, tiny_recipe
from typer.main import get_command

from lapcli.cli import app
from lapcli.runs import open_run, unlock


@pytest.fixture
def complete(tmp_path, monkeypatch, capsys):
    """Completions that fish would offer for a line, in a folder with two runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LAP_RUNS", str(tmp_path))
    for name in ("first", "second"):
        unlock(open_run(tmp_path, name, tiny_recipe(tmp_path / "text.txt")))
    monkeypatch.setenv("_LAP_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")

    def offered(line):
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        capsys.readouterr()
        with pytest.raises(SystemExit):
            get_command(app)(args=[], prog_name="lap")
        return capsys.readouterr().out.split()

    return offered


@pytest.mark.parametrize("line", ["lap runs show ", "lap runs diff first ", "lap eval ", "lap chat --run "])
def test_run_names_are_completed(line, complete):
    assert complete(line) == ["first", "second"]
    assert complete(line + "se") == ["second"]
    assert complete(line + "third") == []


def test_recipe_names_and_files_are_completed(complete):
    assert complete("lap train vit_d") == ["vit_digits"]
    assert complete("lap plan sweeps/la") == ["sweeps/language", "sweeps/laptop"]
    assert complete("lap train recipes/vit_d") == ["recipes/vit_digits.yaml"]
    assert complete("lap train /nowhere/at/all") == []
