"""Mixtures: row counts of each data set, and the order."""

import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import ROOT

from lapcli.data.chat.mixture import (
    count_stage,
    counts_as_text,
    data_sets_of,
    prepare_mixture,
    with_local_data,
)
from lapcli.data.files import read_rows
from lapcli.recipe import load_recipe
from lapcli.recipe.chat import Stage
from lapcli.runtime.errors import DataError

# The hub's rows, where the folder of real files has no copy.
OFFICIAL = {
    "smol-smoltalk/data/test-00000-of-00001.parquet": 24_229,
    "mmlu/auxiliary_train/train-00000-of-00001.parquet": 99_842,
    **{f"smol-smoltalk/data/train-{n:05}-of-00004.parquet": 115_085 + (n == 0) for n in range(4)},
}
MIDTRAIN = {"SmolTalk": 460_341, "MMLU auxiliary": 99_842, "GSM8K": 7_473, "identity": 2_000,
            "simple spelling": 200_000, "spelling bee": 80_000}  # fmt: skip
SFT = {"ARC-Easy": 2_251, "ARC-Challenge": 1_119, "GSM8K": 7_473, "SmolTalk": 10_000, "identity": 1_000,
       "simple spelling": 300, "spelling bee": 300}  # fmt: skip


def talk(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def prepare(data_sets, tokenizer, seed=0, **changes):
    settings = {"longest": 64, "needs_targets": True, **changes}
    return prepare_mixture(data_sets, tokenizer, seed=seed, **settings)


def texts(mixture, tokenizer, epoch=0):
    return [tokenizer.decode(mixture.row(int(n))[0]) for n in mixture.order(epoch)]


def test_the_counts_of_files_are_printed(tmp_path, test_data):
    """`--data` with real ARC, GSM8K, MMLU and identity files, and stand-ins of the official row counts."""
    for name, count in OFFICIAL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"messages": pa.nulls(count)}), tmp_path / name)
    shutil.copytree(test_data / "arc" / "hf", tmp_path / "ai2_arc")
    (tmp_path / "mmlu" / "all").mkdir()
    shutil.copy(test_data / "mmlu/hf/all/test-00000-of-00001.parquet", tmp_path / "mmlu" / "all")
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(
            pa.Table.from_pylist(list(read_rows(test_data / "gsm8k" / f"{split}.jsonl"))),
            tmp_path / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet",
        )
    shutil.copy(test_data / "chat/nanochat_identity_conversations.jsonl", tmp_path / "identity_conversations.jsonl")
    shutil.copy(test_data / "words/words_alpha.txt", tmp_path)
    recipe = with_local_data(load_recipe(ROOT / "recipes/chat561m.yaml"), tmp_path)
    midtrain, sft = (count_stage(stage) for stage in recipe.stages.given().values())
    assert {count["name"]: count["rows"] * count["repeats"] for count in midtrain["train"]} == MIDTRAIN
    assert {count["name"]: count["rows"] * count["repeats"] for count in sft["train"]} == SFT
    assert [count["rows"] * count["repeats"] for count in midtrain["validation"]] == [24_229, 5_200, 420]
    assert (midtrain["rows"], sft["rows"], sft["steps"]) == (849_656, 22_443, 700)
    text = counts_as_text("midtrain", midtrain)
    assert "849,656" in text
    assert "2 x 1,000" in text
    with pytest.raises(DataError, match="missing"):
        with_local_data(recipe, tmp_path / "missing")


def test_both_shuffles_match_the_reference(data_set, tokenizer):
    """numpy's permutation of each data set, its first rows, then Random(seed) over all pairs in order."""
    sets = [
        data_set("a", [talk(f"a{n}", "x") for n in range(10)], rows=4),
        data_set("b", [talk(f"b{n}", "x") for n in range(3)], repeats=2),
    ]
    pairs = [f"a{n}" for n in np.random.default_rng(42).permutation(10)[:4]]
    pairs += [f"b{n}" for n in np.random.default_rng(42).permutation(3)] * 2
    random.Random(42).shuffle(pairs)
    shown = [text.split("<|user_start|>")[1].split("<|user_end|>")[0] for text in
             texts(prepare(sets, tokenizer, seed=42), tokenizer)]  # fmt: skip
    assert shown == pairs


def test_a_malformed_row_stops(data_set, tokenizer):
    with pytest.raises(DataError, match=r"chats.jsonl, row 2: .*correct or remove it$"):
        prepare([data_set("chats", [talk("q", "a"), [], [3]])], tokenizer)
    with pytest.raises(DataError, match=r"row 1: .*OpenAI.*ShareGPT.*Alpaca"):
        prepare([data_set("chats", [{"x": 1}])], tokenizer)


def test_empty_turns_are_malformed(data_set, tokenizer):
    with pytest.raises(DataError, match="row 2: a turn is empty"):
        prepare([data_set("chats", [talk("q", "a"), talk("q", " \n")])], tokenizer)


def test_rows_without_a_target_are_dropped_and_counted(data_set, tokenizer):
    """A question longer than the longest row leaves no room for its answer."""
    rows = [talk("q" * 100, "a"), talk("q", "a"), talk("alone"), talk("q", "b")]
    mixture = prepare([data_set("chats", rows)], tokenizer)
    assert (len(mixture), mixture.dropped, mixture.rows_asked_for) == (2, 2, 4)
    assert "2 without a token to learn" in mixture.describe()
    assert all(mixture.target_counts[mixture.order(epoch)].min() > 0 for epoch in range(3))
    assert len(prepare([data_set("chats", rows)], tokenizer, needs_targets=False)) == 4
    with pytest.raises(DataError, match="no row of the mixture"):
        prepare([data_set("none", rows[:1])], tokenizer)


def test_rows_of_a_hub_data_set(hub, tokenizer, tmp_path, monkeypatch):
    from lapcli.data.chat.mixture import fetch_data_sets
    from lapcli.recipe import recipe_from_dict

    rows = [{"question": f"{n}?", "answer": f"<<{n}+1={n + 1}>>{n + 1}"} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    hub.files["main/train.parquet"] = (tmp_path / "train.parquet").read_bytes()
    data = {"name": "sums", "format": "gsm8k", "source": f"hub:{hub.repository}", "files": "main/train.parquet"}
    stage = {
        "mixture": [data],
        "loss": "all",
        "batching": "padded",
        "train": {"epochs": 1, "batch": 2, "micro_batch": 2},
    }
    recipe = recipe_from_dict({"objective": "chat", "stages": {"sft": stage}})
    assert count_stage(recipe.stages.sft)["rows"] is None  # not on this machine
    (fetched,) = fetch_data_sets(recipe)
    assert (fetched["rows"], fetched["bytes"]) == (5, len(hub.files["main/train.parquet"]))
    assert count_stage(recipe.stages.sft)["rows"] == 5
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(prepare(recipe.stages.sft.mixture, tokenizer)) == 5


def test_own_conversations_are_partly_held_out(data_set, tokenizer):
    """A twentieth by default, the same rows in both stages even if one trains on fewer rows."""
    own = data_set("own", [talk(f"q{n}", f"a{n}") for n in range(60)])
    settings = {"loss": "all", "train": {"epochs": 1, "batch": 2, "micro_batch": 2}}
    midtrain = Stage(mixture=[own], batching="packed", **settings)
    sft = Stage(mixture=[own.model_copy(update={"rows": 30, "repeats": 2})], batching="padded", **settings)
    everything = set(texts(prepare([own], tokenizer), tokenizer))
    held_out = []
    for stage, rows in ((midtrain, 57), (sft, 30)):
        parts = [prepare(data_sets, tokenizer) for data_sets in data_sets_of(stage)]
        train, validation = (texts(mixture, tokenizer) for mixture in parts)
        assert (len(train), len(set(train)), len(validation)) == (rows * stage.mixture[0].repeats, rows, 3)
        assert not set(train) & set(validation)
        assert {*train, *validation} <= everything
        held_out.append(set(validation))
        counts = count_stage(stage)
        assert (counts["train"][0]["rows"], counts["validation_rows"]) == (rows, 3)
    assert held_out[0] == held_out[1]
    with pytest.raises(DataError, match=r"own.*57.*3.*58"):
        prepare(
            data_sets_of(Stage(mixture=[own.model_copy(update={"rows": 58})], batching="padded", **settings))[0],
            tokenizer,
        )


def test_the_held_out_fraction_can_be_set(data_set, tokenizer):
    own, other = (data_set(name, [talk(f"{name}{n}", "a") for n in range(60)]) for name in ("own", "other"))
    settings = {"loss": "all", "batching": "padded", "train": {"epochs": 1, "batch": 2, "micro_batch": 2}}

    def rows(held_out, *validation):
        stage = Stage(
            mixture=[own.model_copy(update={"held_out": held_out})],
            validation={"mixture": list(validation)},
            **settings,
        )
        return [[(d.name, len(prepare([d], tokenizer))) for d in data_sets] for data_sets in data_sets_of(stage)]

    assert rows(0.5) == [[("own", 30)], [("own", 30)]]
    assert rows(0.0) == [[("own", 60)], []]
    assert rows(None, other) == [[("own", 60)], [("other", 60)]]  # validates on conversations already
    assert rows(0.1, other) == [[("own", 54)], [("other", 60), ("own", 6)]]
    single = data_set("single", [talk("q", "a")])
    with pytest.raises(DataError, match="held_out: 0"):
        prepare(data_sets_of(Stage(mixture=[single], **settings))[0], tokenizer)
