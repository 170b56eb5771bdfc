"""The command line: help, streams, exit codes, second starts. In this process unless a separate one matters."""

import json
import re
import sys

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ROOT, run_main, run_process, write_text

from lapcli.cli import app

QUICKSTART = ROOT / "recipes/quickstart.yaml"
# Lines with a key or value to damage: those of the quickstart recipe that contain a key.
LINES = QUICKSTART.read_text().splitlines()
KEYED = [number for number, line in enumerate(LINES) if re.match(r"\s*\w+:", line)]


def test_help_names_the_commands_and_imports_no_torch():
    start = "import sys; from lapcli.cli import main; sys.argv[1:] = ['-h']\n"
    code = start + "try: main()\nfinally: print('modules:', *sys.modules)"
    shown = run_process([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "train" in shown
    assert "fetch" in shown
    loaded = set(shown[shown.index("modules:") :].split())
    assert not loaded & {"torch", "timm", "datasets", "lm_eval", "numpy", "pydantic"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "--run", "nobody"],
        ["analyze", "all", "--run", "nobody"],
        ["train", str(QUICKSTART), "--name", "no/body", "--dry-run"],
        ["train", str(QUICKSTART), "--set", "train.steps=none"],
    ],
)
def test_invalid_commands_are_refused_before_torch_is_imported(arguments, tmp_path):
    code = "import sys; from lapcli.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    refused = run_process(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("lap: ")
    assert not set(refused.stdout.split()) & {"torch", "timm", "datasets", "lm_eval"}


def test_each_help_ends_with_examples(capsys):
    for command in typer.main.get_command(app).commands:
        code, out, _ = run_main(capsys, command, "-h")
        assert code == 0
        assert 2 <= out[out.index("Examples:") :].count(f"lap {command} ") <= 6, command


@pytest.mark.long
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    at=st.sampled_from(KEYED),
    spoil=st.one_of(
        st.from_regex(r"zq[a-z]{1,8}", fullmatch=True).map(lambda name: ("key", name)),
        st.sampled_from(
            ["[[1]]", "{a: 1}", "!!python/object/apply:os.system [id]", "&a [*a]", "'", "1: 2: 3", "1e999"]
        ).map(lambda value: ("value", value)),
    ),
)
def test_damaged_recipes_exit_with_2_and_no_traceback(at, spoil, capsys, tmp_path):
    what, new = spoil
    key, _, _ = LINES[at].partition(":")
    indent = key[: len(key) - len(key.lstrip())]
    line = f"{indent}{new}: 1" if what == "key" else f"{key}: {new}"
    kept = [] if what == "value" else [LINES[at]]
    path = tmp_path / "spoiled.yaml"
    path.write_text("\n".join([*LINES[:at], line, *kept, *LINES[at + 1 :]]))
    code, out, err = run_main(capsys, "train", str(path), "--dry-run")
    assert (code, out) == (2, "")
    assert err.startswith("lap: ")
    assert "spoiled.yaml" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_dry_run_touches_no_data_and_makes_no_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "cache"))
    code, out, _ = run_main(
        capsys, "train", "recipes/gpt561m_5L.yaml", "--dry-run", "--runs-dir", str(tmp_path / "runs")
    )
    assert code == 0
    assert "560,988,160" in out
    assert list(tmp_path.iterdir()) == []


def test_the_quickstart_learns_and_reports_it(quickstart):
    """A quarter of the recipe's steps; `make quickstart` and `make long` run all steps."""
    run, result = quickstart
    info = json.loads((run / "run.json").read_text())
    assert info["status"] == "finished"
    summary = json.loads((run / "summary.json").read_text())
    start, end = (summary[when]["validation_bits_per_byte"] for when in ("start", "end"))
    assert end < 0.7 * start
    for shown in (f"{end:.4f}", "sample:", str(run), "lap train"):
        assert shown in result.stdout
    assert "step 40/40" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_finished_run_is_reported_as_finished(quickstart, capsys):
    run, _ = quickstart
    before = (run / "metrics.jsonl").read_bytes()
    code, out, err = run_main(
        capsys, "train", str(run / "recipe.yaml"), "--name", "quickstart", "--runs-dir", str(run.parent)
    )
    assert code == 0
    assert "is finished: 40 steps" in out
    assert "step 1/" not in err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_seed_names_the_run_and_progress_goes_to_stderr(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt")
    small = ["model.layers=1", "model.context=32", "tokenizer.vocab=300", "train.steps=2", "train.batch=2"]
    sets = [part for key in [*small, "train.micro_batch=2", "data.validation=0.2"] for part in ("--set", key)]
    given = [*sets, "--data", str(text), "--runs-dir", str(tmp_path), "--seed", "3"]
    code, out, err = run_main(capsys, "train", str(QUICKSTART), *given)
    assert code == 0, err
    facts = json.loads((tmp_path / "quickstart-seed3" / "run.json").read_text())
    assert (facts["status"], facts["seed"], facts["step"]) == ("finished", 3, 2)
    assert ("step 2/2" in err, "step 2/2" in out) == (True, False)


def test_ctrl_c_before_the_first_step(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lapcli.objectives.language_model.LanguageModel.prepare", interrupted)
    code, _, err = run_main(capsys, "train", str(QUICKSTART), "--runs-dir", str(tmp_path))
    assert code == 130
    assert err.splitlines()[-1] == "lap: stopped; what was saved is kept, run the same command to resume"
    assert not (tmp_path / "quickstart").exists()  # there was nothing to keep
