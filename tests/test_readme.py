"""The README's commands run: cut to a few steps, except that blocks marked long are only parsed and planned."""

import re
import shlex

import pytest
from support import CHAT_CUT, ROOT, run_main

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(<!-- long[^>]*-->\n)?```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    (bool(long), line) for long, language, body in BLOCKS if language == "sh" for line in body.splitlines() if line
]


def test_there_are_commands_to_run():
    assert len(COMMANDS) >= 5
    assert all(line.startswith("lap ") for _, line in COMMANDS)


@pytest.fixture(scope="module")
def measured_runs(tmp_path_factory):
    """Where the runs that `lap eval` and `lap analyze` look at are trained, each once."""
    return tmp_path_factory.mktemp("measured-runs")


def shortened(recipe: str) -> list[str]:
    """Two steps, with a schedule that fits into them."""
    schedule = {"dino": ["epoch_steps=1", "teacher_warmup_epochs=1"], "vit": ["warmup_epochs=0"]}
    kept = [f"schedule.{value}" for kind, values in schedule.items() if kind in recipe for value in values]
    return [part for value in ("train.steps=2", *kept) for part in ("--set", value)]


@pytest.mark.parametrize(("long", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_command(long, line, capsys, tmp_path, measured_runs, monkeypatch, request):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    needs_runs = (words[0] in {"sft", "chat", "report"} or "quickstart-sft" in words) and not long
    runs = measured_runs if words[0] in {"eval", "analyze"} and not long else tmp_path
    runs = request.getfixturevalue("chat_runs")[0] if needs_runs else runs
    monkeypatch.setenv("LAP_RUNS", str(runs))
    if words[0] == "eval" and long:  # its options are known, its run is not there
        code, _, err = run_main(capsys, *words)
        if "--model" in words:  # nor are its weights
            assert (code, "give a file with --weights" in err) == (2, True), err
            return
        assert (code, f"there is no run {words[words.index('--run') + 1]}" in err) == (2, True), err
        return
    if words[0] == "report" and long:
        code, _, err = run_main(capsys, *words)
        assert (code, "no run in" in err) == (2, True), err
        return
    if "quickstart-sft" in words and words[0] == "eval":
        words += ["--limit", "2", "--samples", "2", "--max-new-tokens", "8"]
    elif words[0] in {"eval", "analyze"}:  # measures what a line before it trained
        name = words[words.index("--run") + 1]
        assert run_main(capsys, "train", f"recipes/{name}.yaml", *shortened(name))[0] == 0
        words += ["--limit", "32"] if words[0] == "analyze" else []
    elif words[0] == "train" and ("vit" in words[1] or "dino" in words[1]):
        words += ["--dry-run"] if long else shortened(words[1])
    elif words[0] == "sweep":
        words += [] if {"--dry-run", "--slurm"} & set(words) else ["--dry-run"]
    elif words[0] == "sft" or (long and "chat561m" in words[1]):
        words = ["sft", *words[1:], *(["--dry-run"] if long else CHAT_CUT)]
    elif words[0] == "report":
        words += ["--out", str(tmp_path / "report.html")] if "html" in words else []
    elif words[0] == "chat":
        words += ["--max-tokens", "8"]
    elif words[0] == "train":
        words += ["--dry-run"] if long else ["--set", "train.steps=2", "--set", "validation.tokens=2048"]
    elif long:
        words[0] = "train"
        words += ["--dry-run"]
    code, out, err = run_main(capsys, *words)
    assert code == 0, err
    assert out


@pytest.mark.parametrize("body", [body for _, language, body in BLOCKS if language == "python"])
def test_python(body):
    exec(compile(body, "README.md", "exec"), {})


def test_the_file_tree_is_complete():
    """Each module has its half line, and each line its module."""
    tree = README[README.index("## Files") :]
    named = set(re.findall(r"(\w+\.py)\b", tree))
    there = {path.name for path in (ROOT / "lapcli").rglob("*.py") if path.name not in {"__init__.py", "__main__.py"}}
    assert named == there
