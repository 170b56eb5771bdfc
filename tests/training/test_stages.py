"""Chat stages as runs: killed stages resume bit for bit, and mismatched stages are refused."""

import io
import json

import pytest
import support
import torch
from support import (
    tiny_chat_recipe,
    tiny_recipe,
    train_here,
    write_text,
)

from lapcli.recipe import recipe_from_dict, recipe_to_dict
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import LogConsole
from lapcli.training.stages import train_stages

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, shared_cache):
    folder = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        recipe = tiny_recipe(write_text(folder / "text.txt"), train={"steps": 2}, checkpoint={"every": 2})
        return train_here(recipe, folder / "runs", "base")


def staged(pretrained, folder, stage, **changes):
    return support.staged(tiny_chat_recipe(folder, **{stage: changes}), stage, pretrained)


def train(pretrained, folder, recipe=None, **options):
    return train_stages(
        recipe or tiny_chat_recipe(folder),
        pretrained,
        runs_dir=folder / "runs",
        name="x",
        console=LogConsole(io.StringIO()),
        **options,
    )


def test_one_stage_at_a_time(pretrained, tmp_path):
    def recipe_of(stage):
        both = recipe_to_dict(tiny_chat_recipe(tmp_path))
        return recipe_from_dict({**both, "stages": {stage: both["stages"][stage]}})

    (midtrain,) = train(pretrained, tmp_path, recipe_of("midtrain"))
    (sft,) = train(midtrain, tmp_path, recipe_of("sft"))
    start = sft.recipe.train.init_from
    assert (start.source, start.sha256) == ("run:x-midtrain", midtrain.info["weights_sha256"])
    again = train(pretrained, tmp_path)  # both are finished
    assert [run.info["updated"] for run in again] == [midtrain.info["updated"], sft.info["updated"]]
    assert (sft.path / "tokenizer.json").read_text() == (pretrained.path / "tokenizer.json").read_text()


def test_a_malformed_conversation_stops_the_run(pretrained, tmp_path):
    tiny_chat_recipe(tmp_path)  # writes the file
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps([{"role": "assistant", "content": "hi"}]) + "\n")
    with pytest.raises(DataError, match=r"chats.jsonl, row 41: message 1 has the role 'assistant'"):
        train_here(staged(pretrained, tmp_path, "sft"), tmp_path / "runs")
    assert not (tmp_path / "runs" / "run").exists()  # before the first step there is nothing to keep
