"""Shell completion, asked as the shells ask for it: names, tasks, keys and values, without torch."""

import contextlib
import os
import pty
import re
import shlex
import shutil
import sys

import pytest
from support import HANG, ROOT, run_process, start_process, tiny_recipe
from typer.main import get_command

from lapcli.cli import app
from lapcli.recipe import load_recipe
from lapcli.runs import open_run, unlock
from lapcli.runtime.errors import UsageError


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


@pytest.mark.parametrize(
    "line",
    [
        "lap runs show ",
        "lap runs diff first ",
        "lap sample --run ",
        "lap eval --run ",
        "lap chat --run ",
        "lap runs rm ",
    ],
)
def test_names_of_runs(line, complete):
    assert complete(line) == ["first", "second"]
    assert complete(line + "se") == ["second"]
    assert complete(line + "third") == []


def test_names_of_recipes_and_files(complete):
    assert complete("lap train vit_d") == ["vit_digits"]
    assert complete("lap plan sweeps/la") == ["sweeps/language", "sweeps/laptop"]
    assert complete("lap train recipes/vit_d") == ["recipes/vit_digits.yaml"]


def test_tasks_are_those_of_the_runs_kind(complete):
    assert "top1" in complete("lap eval --tasks ")
    assert complete("lap eval --tasks top1,top") == ["top1,top5"]
    assert "top1" not in complete("lap eval --run first --tasks ")
    assert complete("lap eval --run nobody --tasks top1,t") == ["top1,top5"]


def test_keys_and_values_of_set(complete):
    assert complete("lap train vit_digits --set optimizer.b") == ["optimizer.betas="]
    values = ["optimizer.name=adamw", "optimizer.name=lamb"]
    assert complete("lap train vit_digits --set optimizer.na") == ["optimizer.name=", *values]
    assert complete("lap train vit_digits --set optimizer.name=") == ["optimizer.name=adamw", "optimizer.name=lamb"]
    assert complete("lap train quickstart --set train.deterministic=t") == ["train.deterministic=true"]
    assert complete("lap train nothing --set train.") == []


#: What is typed before Tab, and what the line is afterwards.
TYPED = {
    "lap eval --tasks kn": "lap eval --tasks knn ",
    "lap eval --tasks top1,t": "lap eval --tasks top1,top5 ",
    "lap eval --run first --tasks hum": "lap eval --run first --tasks humaneval ",
    "lap runs show sec": "lap runs show second ",
    "lap sample --run=sec": "lap sample --run=second ",
    "lap train vit_dig": "lap train vit_digits ",
    "lap train vit_digits --set optimizer.na": "lap train vit_digits --set optimizer.name=",
    "lap train vit_digits --set optimizer.name=ad": "lap train vit_digits --set optimizer.name=adamw ",
    "lap train vit_digits --set optimizer.name=lamb --set train.deterministic=t": "lap train vit_digits --set "
    "optimizer.name=lamb --set train.deterministic=true ",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_in_an_interactive_bash(complete, tmp_path, monkeypatch):
    """Typed at a terminal; Ctrl-A and Ctrl-E make of the line that Tab left a command that prints it."""
    for name in ("_LAP_COMPLETE", "_TYPER_COMPLETE_FISH_ACTION", "_TYPER_COMPLETE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    lap = tmp_path / "bin" / "lap"
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'lap'; from lapcli.cli import main; main()"
    lap.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(start)} "$@"\n')
    lap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lap.parent}:{os.environ['PATH']}")
    keys = ['eval "$(lap --show-completion bash)"\n']
    keys += [f"{typed}\t\x01echo '[\x05]'\n" for typed in TYPED]
    shown = at_a_terminal(["bash", "--norc", "--noprofile", "-i"], "".join(keys) + "exit\n")
    assert re.findall(r"\r\[(.*)\]\r\n", shown) == list(TYPED.values())


def at_a_terminal(command, typed):
    """What a program shows at a terminal of its own where `typed` is typed; as fast as it reads."""
    reader, program = pty.openpty()
    with start_process(
        command, stdin=program, stdout=program, stderr=program, start_new_session=True, env={**os.environ, "PS1": ""}
    ) as started:
        os.close(program)
        os.write(reader, typed.encode())
        shown = b""
        with contextlib.suppress(OSError):  # what Linux raises at the end
            while part := os.read(reader, 4096):
                shown += part
        started.wait(HANG)
    os.close(reader)
    return shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "vit_digits", "dino_quickstart"])
def test_each_key_that_is_offered_exists(name, complete):
    """A recipe loads with it, or refuses its value; none is unknown."""
    keys = complete(f"lap train {name} --set ")
    assert len(keys) > 40
    refusals = []
    for key in keys:
        for setting in complete(f"lap train {name} --set {key}") or [f"{key}1"]:
            try:
                load_recipe(ROOT / "recipes" / f"{name}.yaml", [setting])
            except UsageError as refused:
                refusals.append(str(refused))
    assert [refusal for refusal in refusals if "unknown key" in refusal] == []


def test_torch_is_not_imported(tmp_path):
    code = "import sys; from lapcli.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    for line in ("lap runs show x", "lap train vit", "lap eval --tasks t", "lap train quickstart --set train."):
        environment = {
            "_LAP_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_ARGS": line,
            "PYTHONPATH": str(ROOT),
        }
        asked = ["import sys; sys.argv[0] = 'lap'\n" + code]
        done = run_process(
            [sys.executable, "-c", *asked], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert not set(done.stderr.split()) & {"torch", "timm", "datasets", "lm_eval"}, line
        assert "lapcli.commands.completion" in done.stderr
