"""The loss of a chat-stage step against the mean over complete batches."""

import io
import json

import pytest
import support
import torch
from support import tiny_chat_recipe, tiny_recipe, train_here, write_text

from lapcli.objectives.chat import Chat
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World
from lapcli.training.stages import train_stages

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, shared_cache):
    folder = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        recipe = tiny_recipe(write_text(folder / "text.txt"), train={"steps": 2}, checkpoint={"every": 2})
        return train_here(recipe, folder / "runs")


def built(pretrained, folder, world=None, stage="sft", **changes):
    recipe = support.staged(tiny_chat_recipe(folder, **{stage: changes}), stage, pretrained)
    from lapcli.data.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(pretrained.path / "tokenizer.json")
    chat = support.built(Chat, recipe, tokenizer, world or World(0, 1, CPU))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in chat.model.parameters():
            p.normal_(std=0.2, generator=generator)
    return chat


def step_loss(chats, step=1):
    """As in the loop: the mean over the micro-batches of all ranks."""
    losses = [chat.loss(chat.batch(step, n)) for chat in chats for n in range(chats[0].batches.accumulation)]
    return float((sum(losses) / len(losses)).detach())


def each_target(chat, step=1):
    """The losses of all targets in the global batch, row by row without padding."""
    rows = []
    for place in range(chat.batches.batch):
        tokens, targets = chat._items.items(step * chat.batches.batch + place, 1)
        losses = chat.model.loss(tokens, targets, reduction="none")
        rows.append(losses[targets >= 0])
    return rows


@pytest.mark.parametrize("stage", ["midtrain", "sft"])
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_all_targets_of_a_step_have_equal_weight(pretrained, tmp_path, stage, micro_batch):
    chat = built(pretrained, tmp_path, stage=stage, train={"batch": 8, "micro_batch": micro_batch, "steps": 4})
    assert chat.batches.accumulation == 8 // micro_batch
    expected = torch.cat(each_target(chat)).mean()
    assert step_loss([chat]) == pytest.approx(float(expected), rel=1e-5)


def test_upstream_average_is_the_mean_over_means_of_four_rows(pretrained, tmp_path):
    train = {"batch": 8, "micro_batch": 4, "steps": 4}
    chat = built(pretrained, tmp_path, average="micro_batch", train=train)
    rows = each_target(chat)
    expected = (torch.cat(rows[:4]).mean() + torch.cat(rows[4:]).mean()) / 2
    assert step_loss([chat]) == pytest.approx(float(expected), rel=1e-5)
    assert abs(float(expected) - float(torch.cat(rows).mean())) > 1e-4
    with pytest.raises(UsageError, match="micro_batch is of 4 rows"):
        built(pretrained, tmp_path, World(0, 4, CPU), average="micro_batch", train=train)


def test_only_assistant_tokens_are_targets(pretrained, tmp_path):
    masked, everything = (
        built(pretrained, tmp_path, loss=loss, train={"batch": 8, "micro_batch": 8, "steps": 4})
        for loss in ("assistant", "all")
    )
    tokens, targets, _ = masked.batch(0, 0)
    starts = (tokens == masked.tokenizer.special("<|user_start|>")).any(dim=1)
    assert starts.all()
    for name in ("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|output_start|>"):
        assert not (targets == masked.tokenizer.special(name)).any()
    assert (targets == masked.tokenizer.special("<|assistant_end|>")).sum() == 8
    assert (everything.batch(0, 0).targets_BT == masked.tokenizer.special("<|user_end|>")).sum() == 8


def test_the_last_step_of_an_epoch_can_be_omitted(pretrained, tmp_path):
    """40 rows in batches of 8: 5 steps, or upstream's 4 of 5 on the same schedule."""
    train = {"batch": 8, "micro_batch": 8, "epochs": 1, "steps": None}
    whole = built(pretrained, tmp_path, train=train, schedule={"warmdown": 1.0})
    short = built(pretrained, tmp_path, train=train, schedule={"warmdown": 1.0}, drop_last_update=True)
    assert (whole.steps, short.steps) == (5, 4)
    rates = [1.0, 0.8, 0.6, 0.4]
    for chat in (whole, short):
        multipliers = [chat.learning_rate_multiplier(step) for step in range(4)]
        assert multipliers == pytest.approx([0.5 * rate for rate in rates])  # lr_scale is 0.5


def test_the_summary_contains_answers(pretrained, tmp_path):
    console = LogConsole(io.StringIO())
    recipe = tiny_chat_recipe(tmp_path)
    runs = train_stages(recipe, pretrained, runs_dir=tmp_path / "runs", name="x", console=console)
    assert [run.name for run in runs] == ["x-midtrain", "x-sft"]
    summary = json.loads((runs[1].path / "summary.json").read_text())
    assert [sample["prompt"] for sample in summary["samples"]] == ["what?"]
    assert summary["end"]["validation_loss"] > 0
    assert runs[0].recipe.train.init_from.sha256 == pretrained.info["weights_sha256"]
    start = runs[1].recipe.train.init_from
    assert (start.source, start.sha256) == ("run:x-midtrain", runs[0].info["weights_sha256"])
