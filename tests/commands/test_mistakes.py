"""Mistakes that people make with the commands around runs: one sentence with the next step, and exit code 2."""

import errno
import json
import os
import shlex
import subprocess
import sys

import pytest
from harness_support import make_run
from support import HANG, ROOT, run_main, run_process, tiny_recipe

from lapcli.runs import open_run, unlock
from lapcli.runtime.errors import from_os_error

MISTAKES = {
    "runs show quikstart": "did you mean quickstart?",
    "runs show /": "is not a run directory",
    "runs shw quickstart": "Did you mean 'show'?",
    "runs diff quickstart": "Missing argument 'B'",
    "runs diff quickstart zebra": "it has",
    "runs best --metric bits_per_bite": "did you mean validation_bits_per_byte?",
    "runs rename quickstart my/run": "choose another name",
    "runs rename quickstart other": "already exists; choose another name",
    "runs rm quickstart": "--yes",
    "runs rm zebra --yes": "lap runs lists them",
    "runs prune --keep 0": "--keep",
    "runs list zebra*": "lap runs lists them",
    "runs --runs-dir FILE": "see --runs-dir",
    "runs list --jsn": "--json",
    "runs lst": "Did you mean 'list'?",
    "runs show": "Missing argument 'RUN'",
    "runs show quickstart other": "unexpected extra argument",
    "runs show RUNS/quickstart/recipe.yaml": "lap runs lists them",
    "runs diff quickstart quikstart": "did you mean quickstart?",
    "runs diff quickstart quickstart other": "unexpected extra argument",
    "runs best --metric top1": "known: ",
    "runs best zebra --metric loss": "lap runs lists them",
    "runs best --metric": "requires an argument",
    "runs rename quickstart": "Missing argument 'NEW'",
    "runs rename quikstart x": "did you mean quickstart?",
    "runs rename quickstart ''": "choose another name",
    "runs rename quickstart .hidden": "choose another name",
    "runs rename quickstart quickstart": "already exists; choose another name",
    "runs rm": "Missing argument 'RUNS'",
    "runs rm quickstart zebra --yes": "lap runs lists them",
    "runs rm RUNS --yes": "is a folder of runs, not a run; use --runs-dir",
    "runs du zebra": "lap runs lists them",
    "runs du --runs-dir FILE": "see --runs-dir",
    "runs prune zebra": "lap runs lists them",
    "runs prune --keep two": "valid integer",
    "runs prune --runs-dir FILE": "see --runs-dir",
    "watch zebra": "lap runs lists them",
    "watch quickstart zebra": "lap runs lists them",
    "watch quickstart --metric los": "did you mean loss?",
    "watch quickstart --metric ''": "known: loss",
    "watch quickstart --onse": "--once",
    "watch --every 0": "greater than or equal to 0.1",
    "watch --every fast": "valid number",
    "watch RUNS": "is a folder of runs, not a run; use --runs-dir",
    "watch --runs-dir EMPTY": "see --runs-dir",
    "watch --runs-dir FILE": "see --runs-dir",
    "watch --runs-dir EMPTY/none": "see --runs-dir",
    "track": "Missing argument 'RUNS'",
    "track quickstart": "Missing option '--to'",
    "track quickstart --to mlflow": "'tensorboard', 'wandb', 'trackio'",
    "track quikstart --to tensorboard": "did you mean quickstart?",
    "track zebra* --to tensorboard": "lap runs lists them",
    "track RUNS --to tensorboard": "is a folder of runs, not a run; use --runs-dir",
    "track quickstart --to tensorboard --offline": "leave it out",
    "track quickstart --to tensorboard --project x": "leave it out for tensorboard",
    "track quickstart --to trackio --offline": "leave it out",
    "track quickstart --to wandb --project ''": "--project is empty",
    "sample --run quikstart --prompt a": "did you mean quickstart?",
    "sample --run RUNS --prompt a": "is not a run directory",
    "sample --run quickstart --prompt": "--prompt",
    "sample --run quickstart --prompt ''": "--prompt is empty",
    "sample --run quickstart --promt a": "--prompt",
    "sample 'The list'": "name a run with --run, give a text with --prompt",
    "sample --run quickstart --prompt a --temperature -1": "greater than or equal to 0",
    "sample --run quickstart --prompt a --samples 0": "greater than or equal to 1",
    "sample --run quickstart --prompt a --top-k 0": "greater than or equal to 1",
    "sample --run quickstart --prompt a --max-tokens 0": "greater than or equal to 1",
    "sample --run quickstart --prompt a --seed x": "valid integer",
    "sample --runs-dir EMPTY --prompt a": "train one or use --run",
    "chat --run quickstart": "chat is needed",
    "chat --run zebra": "lap runs lists them",
    "chat --run quikstart": "did you mean quickstart?",
    "chat quickstart": "name a run with --run, give a text with --prompt",
    "chat --prompt ''": "--prompt is empty",
    "chat --promt hello": "--prompt",
    "chat --prompt": "requires an argument",
    "chat --temperature hot": "valid number",
    "chat --temperature -1": "greater than or equal to 0",
    "chat --top-k 0": "greater than or equal to 1",
    "chat --max-tokens 0": "greater than or equal to 1",
    "chat --seed x": "valid integer",
    "chat --runs-dir EMPTY": "train one or use --run",
    "recipes quikstart": "did you mean quickstart?",
    "recipes zebra": "lap recipes lists all",
    "recipes ''": "lap recipes lists all",
    "recipes 'vit[*'": "lap recipes lists all",
    "recipes sweeps": "did you mean sweeps/",
    "recipes recipes/quickstart.yaml": "did you mean quickstart?",
    "recipes quickstart zebra": "lap recipes lists all",
    "recipes quickstart --print --json": "leave one of them out",
    "recipes quickstart --prnt": "--print",
    "recipes --runs-dir x": "No such option: --runs-dir",
    "init": "Missing argument 'DIR'",
    "init FILE": "name another folder",
    "init FILE/x": "name another folder",
    "init EMPTY extra": "unexpected extra argument",
    "init EMPTY/x --job": "requires an argument",
    "init EMPTY/x --job txt": "'text', 'images', 'chat', 'self-supervised'",
    "init EMPTY/x --jobs text": "--job",
    "init EMPTY/x --job Images": "'text', 'images', 'chat', 'self-supervised'",
    "init --job text": "Missing argument 'DIR'",
    "init EMPTY/x --name mine": "No such option: --name",
    "report --format pdff": "'html'",
    "report zebra --format html": "lap runs lists them",
    "report --format html --out EMPTY": "is a folder; name a file in it",
    "report --format html --out FILE/x.html": "make it first",
    "report --format html --runs-dir EMPTY": "choose another --runs-dir",
    "report --format html --columns zebra": "there are validation_bits_per_byte",
    "report --format html --paper table9": "'table1', 'table2', 'table3'",
    "report --format html --size big": "expected width x height",
    "report --format png --dpi 0": "greater than or equal to 30",
    "report --watch": "use --format html",
    "report --format csv --watch": "use --format html",
    "report --format html --watch --every 0": "greater than or equal to 1",
    "report --format html --wach": "--watch",
    "train quikstart": "did you mean the shipped recipe quickstart?",
    "import EMPTY --to a/b": "name another with --to",
    "import FILE --to x": "is not a checkpoint of nanochat",
    "report --rows zebra.stripes": "such as optimizer.lr",
    "export --run quickstart --to gguf": "--to takes hf, timm, safetensors",
    "train quickstart --steps 5": "use --set train.steps=5",
    "train quickstart --batch-size=8 --fresh": "use --set train.batch=8",
    "train quickstart --laplacian-heads 2": "use --set model.laplacian_heads=2",
    "train quickstart --heads": "use --set model.heads=VALUE",
    "sft chat_quickstart --epochs 2": "use --set stages.midtrain.train.epochs=2 or --set stages.sft.train.epochs=2",
    "train quickstart --nam x": "--name",
    "train quickstart --track tensorbord": "tensorboard",
    "train quickstart --set track=[mlflow]": "track",
    "sweep quickstart --over seed=0,1 --track mlflow": "tensorboard",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("quickstart", "other"):
        run = open_run(folder, name, tiny_recipe(folder / "text.txt"))
        run.metrics.write_text(json.dumps({"step": 1, "loss": 2.0, "validation_bits_per_byte": 1.0}) + "\n")
        (run.path / "summary.json").write_text(json.dumps({"end": {"validation_bits_per_byte": 1.0}}))
        run.update(status="finished", step=1, steps=1, weights_sha256="0" * 64)
        unlock(run)
    return folder


@pytest.mark.parametrize(("line", "said"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_and_the_next_step(line, said, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LAP_RUNS", str(runs))
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    places = {"FILE": str(tmp_path / "file"), "EMPTY": str(tmp_path / "empty"), "RUNS": str(runs)}
    words = shlex.split(line)
    for place, path in places.items():
        words = [word.replace(place, path) for word in words]
    before = sorted(os.listdir(runs))
    code, out, err = run_main(capsys, *words)
    assert (code, out) == (2, ""), err
    assert said in err
    assert "Traceback" not in err
    sentences = [text for text in err.splitlines() if text.startswith(("lap: ", "Error: "))]
    assert len(sentences) == 1, err
    assert sorted(os.listdir(runs)) == before
    assert os.listdir(tmp_path / "empty") == []


def test_a_closed_standard_input_is_one_on_which_nothing_is_asked(runs, capsys, monkeypatch):
    monkeypatch.setenv("LAP_RUNS", str(runs))
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run_main(capsys, "runs", "rm", "quickstart")
    assert code == 2
    assert "--yes" in err


@pytest.mark.parametrize("stdin", [None, "/dev/null"])
def test_chat_without_anybody_who_asks(stdin, tmp_path, capsys, monkeypatch):
    """`lap chat <&-`: nothing is asked, and it ends."""
    make_run(tmp_path)
    monkeypatch.setattr(sys, "stdin", stdin and open(stdin))  # noqa: SIM115
    code, _, err = run_main(capsys, "chat", "--runs-dir", str(tmp_path))
    assert code == 0, err
    assert "Traceback" not in err


def test_chat_into_a_full_disk(tmp_path):
    make_run(tmp_path)
    asked = ["chat", "--prompt", "what?", "--max-tokens", "4", "--runs-dir", str(tmp_path)]
    words = [sys.executable, "-m", "lapcli", *asked]
    with open("/dev/full", "w") as full:
        ended = run_process(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=HANG)
    assert ended.returncode == 1
    assert "lap: the output cannot be written (No space left on device); make room" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_an_output_that_is_full_is_one_sentence():
    """`lap runs > /dev/full`: the error of the system names no file."""
    said = str(from_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert said.startswith("the output cannot be written (No space left on device); make room")
