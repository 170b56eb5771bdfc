"""The end of a run: requirements are checked before the first step, and a failure after it loses nothing."""

import io
import json
import os

import pytest
import torch
from safetensors.torch import load_file
from support import exit_code, ranks, start_child, tiny_chat_recipe, tiny_recipe, train_here

from lapcli.objectives.chat import Chat
from lapcli.objectives.classification import Classification
from lapcli.objectives.language_model import LanguageModel
from lapcli.objectives.self_supervised import SelfSupervised
from lapcli.runtime.errors import DataError, LapError, UsageError
from lapcli.runtime.progress import LogConsole
from lapcli.training import train as training
from lapcli.training.stages import train_stages

STEPS = {"train": {"steps": 2}}
OBJECTIVES = {
    "language_model": LanguageModel,
    "chat": Chat,
    "classification": Classification,
    "self_supervised": SelfSupervised,
}
POSITIONS = 320  # of the tiny GPT: ten times its context


def never(*arguments, **options):
    raise AssertionError("a step was taken")


def test_later_stages_are_checked_before_the_first_starts(base, tmp_path):
    def train(recipe):
        runs = tmp_path / "runs"
        return train_stages(recipe, base, runs_dir=runs, name="x", console=LogConsole(io.StringIO()))

    recipe = tiny_chat_recipe(tmp_path, sft={"validation": {"prompts": ["what?"], "sample_tokens": POSITIONS}})
    with pytest.raises(UsageError, match=r"stage sft: validation\.sample_tokens"):
        train(recipe)
    missing = [{"name": "chats", "format": "conversations", "source": str(tmp_path / "nowhere.jsonl")}]
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        train(tiny_chat_recipe(tmp_path, sft={"mixture": missing}))
    assert not (tmp_path / "runs").exists()


def fail_once(monkeypatch, owner, name, error):
    before = getattr(owner, name)

    def failing(*arguments, **options):
        monkeypatch.setattr(owner, name, before)
        raise error

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(("kind", "where"), [("classification", "finish"), ("language_model", "write_summary")])
def test_the_same_command_finishes_a_run_that_failed_at_its_end(kinds, tmp_path, monkeypatch, kind, where):
    recipe = kinds[kind](**STEPS)
    owner = training if where == "write_summary" else OBJECTIVES[kind]
    whole = train_here(recipe, tmp_path, "whole")
    fail_once(monkeypatch, owner, where, OSError("No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        train_here(recipe, tmp_path, "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["status"], info["step"]) == ("failed", 2)
    monkeypatch.setattr("lapcli.training.loop.Loop._update", never)  # nothing is left to train
    run = train_here(recipe, tmp_path, "run")
    assert run.is_finished
    one, other = (load_file(r.checkpoints / "step-000002" / "model.safetensors") for r in (whole, run))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    summaries = [json.loads((r.path / "summary.json").read_text()) for r in (whole, run)]
    for summary in summaries:
        summary.pop("sha256", None)  # a checksum of the file counts its own
    assert summaries[0] == summaries[1]


def _become(rank, fails):
    def finish(self):
        raise LapError("the disk is full")

    os.environ.update(rank)
    if fails:
        LanguageModel.finish = finish


def test_both_ranks_exit_when_the_end_fails(text, tmp_path, shared_cache):
    """The other rank waits for rank 0, for up to half an hour."""
    recipe, runs = tiny_recipe(text, **STEPS), tmp_path / "runs"
    children = [start_child(recipe, runs, shared_cache, _become, rank, True) for rank in ranks(2)]
    assert [exit_code(child) for child in children] == [1, 1]
    info = json.loads((runs / "run" / "run.json").read_text())
    assert (info["status"], info["failure"], info["step"]) == ("failed", "the disk is full", 2)
    children = [start_child(recipe, runs, shared_cache, _become, rank, False) for rank in ranks(2)]
    assert [exit_code(child) for child in children] == [0, 0]
    assert json.loads((runs / "run" / "run.json").read_text())["status"] == "finished"
