"""Out of memory: one sentence with the micro-batch to try, no traceback, and the run resumes."""

import json

import torch
import yaml
from support import TINY, run_main, write_text

from lapcli.evaluation import run_tasks
from lapcli.objectives.language_model import LanguageModel

REASON = "CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation for Memory Management"


def test_training_and_evaluation_suggest_a_remedy(monkeypatch, tmp_path, capsys, shared_cache):
    recipe = tmp_path / "tiny.yaml"
    sections = {**TINY, "data": {**TINY["data"], "train": str(write_text(tmp_path / "text.txt"))}}
    sections["train"] = {**TINY["train"], "steps": 4, "batch": 8, "micro_batch": 4}
    sections["checkpoint"] = {"every": 1, "keep": 2}
    recipe.write_text(yaml.safe_dump(sections))
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    train = ["train", str(recipe), "--runs-dir", str(tmp_path)]
    batch = LanguageModel.batch

    def large(*arguments):
        raise torch.OutOfMemoryError(REASON)

    def large_at_step_3(self, step, micro_step):
        return large() if step == 2 else batch(self, step, micro_step)

    with monkeypatch.context() as full:
        full.setattr(LanguageModel, "batch", large_at_step_3)
        code, _, said = run_main(capsys, *train)
    assert code == 1
    assert " ".join(said[said.index("lap: ") :].split()).count("--set train.micro_batch=2") == 1
    assert "Traceback" not in said
    info = json.loads((tmp_path / "tiny" / "run.json").read_text())
    assert (info["status"], info["step"]) == ("failed", 1)  # the batch of step 3 is asked for during step 2
    assert "micro_batch" in info["failure"]
    assert run_main(capsys, *train)[0] == 0

    monkeypatch.setattr(run_tasks, "open_run", large)
    code, _, said = run_main(capsys, "eval", "--run", "tiny", "--tasks", "bpb", "--runs-dir", str(tmp_path))
    assert code == 1
    assert "--batch" in said
    assert "Traceback" not in said
