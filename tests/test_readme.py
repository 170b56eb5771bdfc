"""The commands of README and docs run: cut to a few steps; blocks marked long are only parsed and planned."""

import re
import shlex
import shutil

import pytest
from support import CHAT_CUT, ROOT, run_main

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"(<!-- long[^>]*-->\n)?```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)
]
#: The table of jobs in the README: its second column.
JOBS = re.findall(r"^\| [^|]+ \| `(lap [^`]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
IN_BLOCKS = {line: bool(long) for long, kind, body in BLOCKS if kind == "sh" for line in body.splitlines() if line}
COMMANDS = list((dict.fromkeys(JOBS, False) | IN_BLOCKS).items())  # each once
#: The jobs of the README belong to `make test`, commands that only the docs show to `make long`.
CASES = [pytest.param(*case, id=case[0], marks=() if case[0] in JOBS else pytest.mark.long) for case in COMMANDS]


def test_there_are_commands_to_run():
    assert len(JOBS) > 15
    assert all(line.startswith("lap ") for line, _ in COMMANDS)


def test_chat_names_the_run_that_it_uses():
    """Otherwise it would be the newest run, which in the order of the pages is the baseline."""
    stages = [line for line, _ in COMMANDS if line.startswith("lap sft ")]
    assert stages
    assert [line for line in stages if "--run " not in line and "--init-from " not in line] == []
    assert [line for line, _ in COMMANDS if line.startswith(("lap chat -", "lap sample -"))] == []


@pytest.fixture(scope="module")
def measured_runs(tmp_path_factory):
    """The folder of the runs for `lap eval` and `lap analyze`, each trained once."""
    return tmp_path_factory.mktemp("measured-runs")


def shortened(recipe: str) -> list[str]:
    """Two steps, with a schedule that fits into them."""
    schedule = {"dino": ["epoch_steps=1", "teacher_warmup_epochs=1"], "vit": ["warmup_epochs=0"]}
    kept = [f"schedule.{value}" for kind, values in schedule.items() if kind in recipe for value in values]
    return [part for value in ("train.steps=2", *kept) for part in ("--set", value)]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "long"), CASES)
def test_a_command_runs(line, long, capsys, tmp_path, measured_runs, monkeypatch, request):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    needs_runs = (
        words[0] in {"sft", "chat", "report", "runs", "sample"} or "quickstart-sft" in words or "gpt_continue" in line
    ) and not long
    runs = measured_runs if words[0] in {"eval", "analyze", "export"} and not long else tmp_path
    runs = request.getfixturevalue("chat_runs")[0] if needs_runs else runs
    if words[0] in {"runs", "report"} or "gpt_continue" in line:  # some of them change what is there
        runs = shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.setenv("LAP_RUNS", str(runs))
    if words[0] == "eval" and long:  # its options are known, its run is not there
        code, _, err = run_main(capsys, *words)
        assert (code, "there is no" in err) == (2, True), err
        return
    if words[0] == "report" and long:
        code, _, err = run_main(capsys, *words)
        assert (code, "there is no run" in err) == (2, True), err
        return
    if words[0] == "doctor":  # its other sections have tests of their own
        words += ["--only", "environment"] if long else []
    elif "quickstart-sft" in words and words[0] == "eval":
        words += ["--limit", "2", "--set", "sampling.samples=2", "--set", "sampling.max_tokens=8"]
    elif words[0] == "export" and "quickstart-sft" in words:
        words += ["--no-verify", "--out", str(tmp_path / "out")]
    elif words[0] in {"eval", "analyze", "export"}:  # of what a line before it trained
        name = words[2 if words[0] == "analyze" else 1]
        assert run_main(capsys, "train", f"recipes/{name}.yaml", *shortened(name))[0] == 0
        words += {"analyze": ["--limit", "32"], "export": ["--no-verify"]}.get(words[0], [])
    elif words[0] == "train" and ("vit" in words[1] or "dino" in words[1]):
        words += ["--dry-run"] if long else shortened(words[1])
    elif words[0] in {"sweep", "search"}:
        words += [] if {"--dry-run", "--slurm"} & set(words) else ["--dry-run"]
    elif words[0] == "sft" or (long and "chat561m" in words[1]):
        words = ["sft", *words[1:], *(["--dry-run"] if long or "stages.midtrain=null" in words else CHAT_CUT)]
    elif words[0] in {"report", "recipes"} or "--dry-run" in words:
        pass
    elif words[0] == "init":
        words[1] = str(tmp_path / words[1])
    elif words[0] in {"chat", "sample"}:
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
def test_python_blocks_run(body, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LAP_RUNS", str(tmp_path))
    exec(compile(body, "README.md", "exec"), {})


def test_links_resolve():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
