"""Chat recipes: accepted keys, and the reported locations of problems."""

import pytest
from support import ROOT

from lapcli.recipe import load_recipe, recipe_from_dict, recipe_to_dict, recipe_to_yaml

RECIPE = """objective: chat
stages:
  sft:
    mixture:
      - {name: a, format: conversations, source: a.jsonl}
      - name: b
        format: spelling_bee
        rows: 10
    loss: assistant
    batching: padded
    train: {epochs: 1, batch: 8, micro_batch: 4}
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("        rows: 10\n", "", "x.yaml:7  stages.sft.mixture[1].rows: say how many rows to generate"),
        ("rows: 10", "rowss: 10", "x.yaml:8  stages.sft.mixture[1].rowss: unknown key; did you mean `rows`?"),
        (
            "source: a.jsonl",
            "source: builtin",
            "x.yaml:5  stages.sft.mixture[0].source: `builtin` has no conversations; expected hub:OWNER/NAME, "
            "https://... or a file",
        ),
        (
            "batching: padded",
            "batching: packed\n    average: micro_batch",
            "x.yaml:11  stages.sft.average: packed micro-batches have the same number of tokens; use tokens",
        ),
    ],
)
def test_each_problem_of_a_chat_recipe(problems, old, new, line):
    assert problems(RECIPE.replace(old, new, 1))[0] == line


@pytest.mark.parametrize("name", ["chat561m", "chat_quickstart"])
def test_a_valid_chat_recipe_is_unchanged(name, tmp_path):
    recipe = load_recipe(ROOT / f"recipes/{name}.yaml")
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe


def test_the_stages_of_the_paper():
    """nanochat's two stages, number by number."""
    stages = load_recipe(ROOT / "recipes/chat561m.yaml").stages
    midtrain, sft = stages.midtrain, stages.sft
    assert (midtrain.loss, midtrain.batching, midtrain.average) == ("all", "packed", "tokens")
    assert midtrain.train.batch * 2048 == 524_288
    assert (midtrain.schedule.warmup, midtrain.schedule.warmdown, midtrain.schedule.final) == (0.0, 0.2, 0.0)
    assert (midtrain.optimizer.lr_scale, midtrain.optimizer.clip, midtrain.optimizer.weight_decay) == (1.0, None, 0.0)
    assert (midtrain.optimizer.momentum_start, midtrain.optimizer.momentum_warmup) == (0.85, 300)
    assert (midtrain.validation.every, midtrain.validation.tokens) == (150, 10_485_760)
    assert (sft.loss, sft.batching, sft.average, sft.drop_last_update) == ("assistant", "padded", "micro_batch", True)
    assert (sft.train.batch, sft.train.micro_batch, sft.train.epochs) == (32, 4, 1)
    assert sft.schedule.warmdown == 1.0
    assert (sft.optimizer.momentum, sft.optimizer.momentum_warmup, sft.optimizer.clip) == (0.95, 0, None)
    scale, width = sft.optimizer.lr_scale, (1280 / 768) ** -0.5
    assert sft.optimizer.lr * scale == pytest.approx(4e-4)
    assert sft.optimizer.embedding_lr * width * scale == pytest.approx(3.098e-3, rel=1e-3)
    assert sft.optimizer.head_lr * width * scale == pytest.approx(6.197e-5, rel=1e-3)
    assert sft.validation.every == 100
    quickstart = load_recipe(ROOT / "recipes/chat_quickstart.yaml").stages.sft
    assert (quickstart.average, quickstart.drop_last_update) == ("tokens", False)
