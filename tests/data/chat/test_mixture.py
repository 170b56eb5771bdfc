"""Mixtures: how many rows of what, in which order."""

import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import ROOT
from text_support import flip

from lapcli.data.chat.formats import with_local_data
from lapcli.data.chat.mixture import (
    Mixture,
    MixtureShare,
    chosen_rows,
    count_stage,
    counts_as_text,
    data_sets_of,
    prepare_mixture,
    prepare_rows,
)
from lapcli.data.file_formats import read_rows
from lapcli.recipe import load_recipe
from lapcli.recipe.chat import DataSet, Stage
from lapcli.runtime.errors import DataError

# What the hub has, where the folder of real files has no copy.
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
    settings = {"longest": 64, "needs_targets": True, "skip_malformed": False, **changes}
    return prepare_mixture(data_sets, tokenizer, seed=seed, **settings)


def texts(mixture, tokenizer, epoch=0):
    return [tokenizer.decode(mixture.row(int(n))[0]) for n in mixture.order(epoch)]


class StandIn:
    """As many rows as a real data set, and nothing in them."""

    malformed, examples_of_malformed, identity, longest = 0, (), "", 64

    def __init__(self, count):
        self.lengths = self.target_counts = np.full(count, 2)
        self.is_cut = np.zeros(count, dtype=bool)

    def __len__(self):
        return len(self.lengths)


@pytest.mark.parametrize(("stage", "expected"), [("midtrain", MIDTRAIN), ("sft", SFT)])
def test_the_papers_mixtures(stage, expected):
    """The rows of an epoch by data set, each row of the smaller mixture at most once but for the repeats."""
    recipe = load_recipe(ROOT / "recipes/chat561m.yaml")
    official = {"SmolTalk": 460_341, "MMLU auxiliary": 99_842, "GSM8K": 7_473, "identity": 1_000,
                "ARC-Easy": 2_251, "ARC-Challenge": 1_119}  # fmt: skip
    parts = []
    for data_set in recipe.stages.given()[stage].mixture:
        rows = StandIn(official.get(data_set.name, data_set.rows))
        parts.append(MixtureShare(data_set, rows, chosen_rows(data_set, len(rows), recipe.seed)))
    mixture = Mixture(parts, recipe.seed, needs_targets=True)
    order = mixture.order(0)
    assert len(order) == len(set(order.tolist())) == sum(expected.values())
    assert len(order) == {"midtrain": 849_656, "sft": 22_443}[stage]
    counts = np.bincount(mixture._part_of[order], minlength=len(parts))
    assert dict(zip((part.data_set.name for part in parts), counts.tolist(), strict=True)) == expected
    assert f"{sum(expected.values()):,} rows" in mixture.describe()


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
    found = {count["name"]: count["available"] for count in midtrain["train"] + sft["train"]}
    assert found["SmolTalk"] == 460_341
    assert (found["GSM8K"], found["ARC-Easy"], found["identity"]) == (7_473, 2_251, 1_000)
    text = counts_as_text("midtrain", midtrain)
    assert "849,656" in text
    assert "2 x 1,000" in text
    with pytest.raises(DataError, match="missing"):
        with_local_data(recipe, tmp_path / "missing")


def test_the_order_is_a_function_of_the_seed(data_set, tokenizer):
    sets = [data_set(name, [talk(f"{name}{n}", "x") for n in range(20)]) for name in "ab"]
    one, same, other = (texts(prepare(sets, tokenizer, seed=seed), tokenizer) for seed in (1, 1, 2))
    assert one == same != other
    assert sorted(one) == sorted(other)
    mixture = prepare(sets, tokenizer, seed=1)
    assert sorted(texts(mixture, tokenizer, epoch=1)) == sorted(one) != texts(mixture, tokenizer, epoch=1)


def test_both_shuffles_are_the_fact_sheets(data_set, tokenizer):
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


def test_more_rows_than_there_are(data_set, tokenizer):
    with pytest.raises(DataError, match="a has 2 rows, but the recipe asks for 3"):
        prepare([data_set("a", [talk("a", "b")] * 2, rows=3)], tokenizer)


def test_rows_of_no_known_form_are_refused_with_the_expected_one(data_set, tokenizer):
    rows = [{"prompt": "a", "completion": "b"}] * 5
    with pytest.raises(DataError) as error:
        prepare([data_set("chats", rows)], tokenizer)
    message = str(error.value)
    assert "chats.jsonl row 1: " in message
    assert '{"conversations": [{"from": "human"' in message
    assert "skip_malformed" not in message  # which would leave nothing to train on


def test_malformed_rows_stop_or_are_skipped(data_set, tokenizer):
    rows = [talk("q", "a"), [], talk("q", "b"), [{"role": "assistant", "content": "x"}], {"x": 1}, [3]]
    data = data_set("chats", rows)
    with pytest.raises(DataError) as error:
        prepare([data], tokenizer)
    for named in ("4 of 6 conversations of chats", "chats.jsonl row 2: ", "chats.jsonl row 4: ", "skip_malformed"):
        assert named in str(error.value)
    mixture = prepare([data], tokenizer, skip_malformed=True)
    assert len(mixture) == 2
    assert "4 malformed" in mixture.describe()


@pytest.mark.parametrize(
    ("row", "turn"),
    [
        (talk("", "a"), "turn 1"),
        (talk("q", " \n"), "turn 2"),
        (talk("q", "a", "\t", "b"), "turn 3"),
        ([*talk("q"), {"role": "assistant", "content": [{"type": "text", "text": ""}]}], "turn 2"),
    ],
)
def test_empty_turns_are_malformed(data_set, tokenizer, row, turn):
    with pytest.raises(DataError, match=f"1 of 2 conversations of chats .*\n.*row 2: {turn}"):
        prepare([data_set("chats", [talk("q", "a"), row])], tokenizer)


def test_conversations_that_are_cut_are_counted(data_set, tokenizer):
    """One byte a token, and five tokens around a question and its answer."""
    lengths = [10, 40 - 6, 40 - 5, 1000, 10]
    mixture = prepare([data_set("chats", [talk("q", "a" * length) for length in lengths])], tokenizer, longest=40)
    assert sorted(mixture.lengths) == [16, 16, 40, 40, 40]
    assert mixture.cut == 2
    assert "2 (40.0%) are cut" in mixture.describe()


@pytest.mark.parametrize("name", ["tokens.bin", "targets.bin", "documents.bin"])
def test_rows_are_rendered_once_and_a_damaged_file_again(data_set, tokenizer, lap_cache, monkeypatch, name):
    data = data_set("chats", [talk("q" * (n % 5 + 1), "a" * (n % 9 + 1)) for n in range(200)])

    def all_rows():
        rows = prepare_rows(data, tokenizer, 64)
        assert rows.target_counts.tolist() == [int(rows.row(number)[1].sum()) for number in range(len(rows))]
        return [tuple(part.tolist() for part in rows.row(number)) for number in range(len(rows))]

    expected = all_rows()
    with monkeypatch.context() as second:
        second.setattr("lapcli.data.chat.mixture.render_batch", None)
        assert all_rows() == expected
    (path,) = lap_cache.glob(f"chat/*/{name}")
    flip(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=f"{name} is damaged"):
        all_rows()
    assert all_rows() == expected


def test_rows_without_a_target_are_dropped_and_counted(data_set, tokenizer):
    """A question beyond the longest row leaves no room for its answer."""
    rows = [talk("q" * 100, "a"), talk("q", "a"), talk("alone"), talk("q", "b")]
    mixture = prepare([data_set("chats", rows)], tokenizer)
    assert (len(mixture), mixture.dropped, mixture.rows_asked_for) == (2, 2, 4)
    assert "2 without a token to learn" in mixture.describe()
    assert all(mixture.target_counts[mixture.order(epoch)].min() > 0 for epoch in range(3))
    assert len(prepare([data_set("chats", rows)], tokenizer, needs_targets=False)) == 4
    with pytest.raises(DataError, match="no row of the mixture"):
        prepare([data_set("none", rows[:1])], tokenizer)


def test_what_is_not_here_is_named_with_what_would_fetch_it(tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = DataSet(name="x", format="gsm8k", source="hub:someone/something", files="a.parquet")
    web = DataSet(name="x", format="gsm8k", source="https://example.invalid/a.jsonl")
    for data in (hub, web):
        with pytest.raises(DataError, match="lap fetch"):
            prepare_rows(data, tokenizer, 64)


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


def test_a_download_is_kept_and_checked(tmp_path, monkeypatch, tokenizer):
    import hashlib
    import urllib.request

    content = (tmp_path / "a.jsonl").write_bytes(b'[{"role": "user", "content": "hi"}]\n') and (
        tmp_path / "a.jsonl"
    ).read_bytes()
    asked = []
    opened = urllib.request.urlopen
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(  # only the transport: a file of this machine for the address
        urllib.request,
        "urlopen",
        lambda address, timeout: asked.append(address) or opened((tmp_path / "a.jsonl").as_uri()),
    )
    address = "https://example.invalid/a.jsonl"
    good = DataSet(name="x", format="conversations", source=address, sha256=hashlib.sha256(content).hexdigest())
    for _ in range(2):
        assert len(prepare_rows(good, tokenizer, 64)) == 1
    assert asked == [address]
    with pytest.raises(DataError, match="sha256"):
        prepare_rows(good.model_copy(update={"sha256": "0" * 64}), tokenizer, 64)


def test_own_conversations_hold_some_out(data_set, tokenizer):
    """By default a twentieth, the same rows in both stages, also where fewer rows are trained on."""
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


def test_what_is_held_out_can_be_chosen(data_set, tokenizer):
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
