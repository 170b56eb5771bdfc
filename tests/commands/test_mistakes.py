"""Mistakes that people make with the commands around runs: one sentence with the next step, and exit code 2."""

import json
import os

import pytest
from support import run_main, tiny_recipe

from lapcli.runs import open_run
from lapcli.runs.opening import unlock

MISTAKES = {
    "runs show quikstart": "did you mean quickstart?",
    "runs show /": "is not a run directory",
    "runs shw quickstart": "Did you mean 'show'?",
    "runs diff quickstart": "Missing argument 'B'",
    "runs diff quickstart zebra": "it has",
    "runs best --metric bits_per_bite": "did you mean validation_bits_per_byte?",
    "runs rename quickstart my/run": "choose another name",
    "runs rename quickstart other": "exists already; choose another name",
    "runs rm quickstart": "--yes",
    "runs rm zebra --yes": "lap runs lists them",
    "runs prune --keep 0": "--keep",
    "runs list zebra*": "lap runs lists them",
    "runs --runs-dir FILE": "see --runs-dir",
    "watch zebra": "lap runs lists them",
    "watch quickstart --metric los": "did you mean loss?",
    "watch --runs-dir EMPTY": "see --runs-dir",
    "track quickstart": "Missing option '--to'",
    "track quickstart --to mlflow": "'tensorboard', 'wandb', 'trackio'",
    "track quikstart --to tensorboard": "did you mean quickstart?",
    "track quickstart --to tensorboard --offline": "leave it out",
    "track quickstart --to trackio --offline": "leave it out",
    "sample --run quikstart --prompt a": "did you mean quickstart?",
    "sample --run quickstart --prompt": "--prompt",
    "sample --run quickstart --promt a": "--prompt",
    "sample --run quickstart --prompt a --temperature -1": "greater than or equal to 0",
    "sample --runs-dir EMPTY --prompt a": "train one or use --run",
    "chat --run quickstart": "chat is needed",
    "chat --run zebra": "lap runs lists them",
    "recipes quikstart": "did you mean quickstart?",
    "recipes quickstart --print --json": "leave one of them out",
    "init": "Missing argument 'DIR'",
    "init FILE": "name another folder",
    "init EMPTY/x --job txt": "'text', 'images', 'chat', 'self-supervised'",
    "train quikstart": "did you mean the shipped recipe quickstart?",
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
    places = {"FILE": str(tmp_path / "file"), "EMPTY": str(tmp_path / "empty")}
    words = line.split()
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
