"""Shell completion, asked as a shell asks for it: names of runs and recipes, without torch."""

import sys

import pytest
from support import ROOT, run_process, tiny_recipe
from typer.main import get_command

from lapcli.cli import app
from lapcli.runs import open_run, unlock


@pytest.fixture
def complete(tmp_path, monkeypatch, capsys):
    """What fish would offer for a line, in a folder with two runs."""
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
def test_names_of_runs(line, complete):
    assert complete(line) == ["first", "second"]
    assert complete(line + "se") == ["second"]
    assert complete(line + "third") == []


def test_names_of_recipes_and_files(complete):
    assert complete("lap train vit_d") == ["vit_digits"]
    assert complete("lap plan sweeps/la") == ["sweeps/language", "sweeps/laptop"]
    assert complete("lap train recipes/vit_d") == ["recipes/vit_digits.yaml"]
    assert complete("lap train /nowhere/at/all") == []


def test_torch_is_not_imported(tmp_path):
    code = "import sys; sys.argv[0] = 'lap'; from lapcli.cli import main\n"
    code += "try: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    for line in ("lap runs show x", "lap train vit"):
        environment = {
            "_LAP_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_ARGS": line,
            "PYTHONPATH": str(ROOT),
        }
        done = run_process(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert not set(done.stderr.split()) & {"torch", "timm", "datasets", "lm_eval"}, line
        assert "lapcli.commands.options" in done.stderr
