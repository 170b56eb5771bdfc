import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import HANG, start_process
from text_support import TOKENIZER, documents, jsonl, source, story, write_stories

from lapcli.data.text import corpus
from lapcli.data.text.tokenizer import train_tokenizer
from lapcli.data.text.tokens import describe_source, prepare_text
from lapcli.recipe.schema import TextSource, TokenizerSection
from lapcli.runtime.errors import DataError


@pytest.fixture
def stories(tmp_path):
    return write_stories(tmp_path / "stories.jsonl")


@pytest.mark.parametrize("shuffled", [True, False])
def test_every_document_is_on_one_side_once(stories, shuffled):
    prepared = prepare_text(source(stories, validation=0.1, shuffled=shuffled), TOKENIZER)
    train, held = documents(prepared, "train"), documents(prepared, "validation")
    assert len(train) == 90
    assert sorted(train + held) == sorted(story(i) for i in range(100))
    assert (train == [story(i) for i in range(90)]) == shuffled
    assert prepared.documents == 100


def test_shuffling_and_splitting_follow_the_seed(stories):
    first, again, other = (
        prepare_text(source(stories, shuffle_seed=seed), TokenizerSection(vocab=270)) for seed in (1, 1, 2)
    )
    assert documents(first, "train") == documents(again, "train")
    assert set(documents(first, "validation")) != set(documents(other, "validation"))
    assert len(documents(first, "validation")) == 5


def test_the_last_of_several_files_is_held_out(tmp_path):
    for name in "cab":
        jsonl(tmp_path / f"{name}.jsonl", [f"{name} {story(i)}" for i in range(9)])
    for keys in ({}, {"validation": "last_file"}):
        prepared = prepare_text(source(tmp_path, **keys), TOKENIZER)
        assert sorted(documents(prepared, "validation")) == [f"c {story(i)}" for i in range(9)]
        assert {text[0] for text in documents(prepared, "train")} == {"a", "b"}
    by_list = prepare_text(source(tmp_path, files=["c.jsonl", "b.jsonl"]), TOKENIZER)
    assert {text[0] for text in documents(by_list, "validation")} == {"b"}
    with pytest.raises(DataError, match=r"last_file.*only .*a\.jsonl"):
        prepare_text(source(tmp_path / "a.jsonl", validation="last_file"), TOKENIZER)


def test_one_text_is_cut_in_two(tmp_path):
    text = "".join(story(i) + "\r\n" for i in range(100))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    prepared = prepare_text(source(tmp_path / "a.txt"), TOKENIZER)
    (train,), (held,) = documents(prepared, "train"), documents(prepared, "validation")
    assert train + held == text.replace("\r\n", "\n")
    assert train.endswith("\n")
    assert 0.03 < len(held) / len(text) < 0.07


def test_documents_are_cropped_and_separated(tmp_path):
    (tmp_path / "a.txt").write_text("\n---\n".join([*(story(i) for i in range(20)), "", ""]))
    prepared = prepare_text(source(tmp_path / "a.txt", separator="---", crop=40), TOKENIZER)
    assert sorted(documents(prepared, "train") + documents(prepared, "validation")) == sorted(
        story(i)[:40] for i in range(20)
    )
    assert "2 empty ones left out" in prepared.description


def test_nulls_and_empty_documents_are_counted(tmp_path):
    pq.write_table(pa.table({"body": [story(1), None, story(2), ""] * 5}), tmp_path / "a.parquet")
    prepared = prepare_text(source(tmp_path, column="body"), TOKENIZER)
    assert prepared.documents == 10
    assert "10 empty ones left out" in prepared.description
    (prepared.folder / "index.json").unlink()
    assert prepare_text(source(tmp_path, column="body"), TOKENIZER).description == prepared.description


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": null}\n'])
def test_no_text_is_an_error(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"no text in it; check data\.train"):
        prepare_text(source(tmp_path), TOKENIZER)
    (tmp_path / "b.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"no text"):
        prepare_text(source(tmp_path), TOKENIZER)


def test_an_empty_held_out_file_is_an_error(tmp_path):
    jsonl(tmp_path / "a.jsonl", [story(i) for i in range(20)])
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match="no text for validation"):
        prepare_text(source(tmp_path), TOKENIZER)


def test_a_file_under_two_names_is_read_once(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("a.txt", "deep/b.txt"):
        (tmp_path / name).write_text(story(1) * 20)
    (tmp_path / "deep" / "loop").symlink_to("..")
    (tmp_path / "latest.txt").symlink_to("a.txt")
    assert prepare_text(source(tmp_path, files=["**/*.txt", "a.txt"]), TOKENIZER).source_files == 2


def test_keys_that_do_nothing_are_refused(stories, tmp_path):
    with pytest.raises(DataError, match=r"data\.separator"):
        prepare_text(source(stories, separator="---"), TOKENIZER)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data\.column"):
        prepare_text(source(tmp_path / "a.txt", column="body"), TOKENIZER)


def test_the_tokenizer_never_sees_what_is_held_out(tmp_path):
    jsonl(tmp_path / "a.jsonl", [story(i) for i in range(30)])
    jsonl(tmp_path / "b.jsonl", ["zqzqzqzqzqzq" * 100])
    prepared = prepare_text(source(tmp_path), TOKENIZER)
    assert prepared.tokenizer.encode("zq") == [ord("z"), ord("q")]
    alone = train_tokenizer((story(i) for i in range(30)), 280, max_chars=10**9, crop=10**9)
    assert alone.sha256 == prepared.tokenizer.sha256


def test_what_does_not_change_the_tokenizer_shares_it(stories, lap_cache):
    """As the seven GPTs do: their recipes differ in the model, not in data and tokenizer."""
    first, second = (prepare_text(source(stories), TOKENIZER) for _ in range(2))
    assert first.identity == second.identity
    assert len(list((lap_cache / "tokenizers").glob("*/tokenizer.json"))) == 1
    prepare_text(source(stories), TokenizerSection(vocab=280, train_crop=50))
    prepare_text(source(stories), TokenizerSection(vocab=280, train_chars=1000))
    assert len(list((lap_cache / "tokenizers").glob("*/tokenizer.json"))) == 3


def test_a_named_tokenizer_is_used(stories, tmp_path):
    path = tmp_path / "mine.json"
    mine = train_tokenizer(["other words"] * 3, 270, max_chars=10**9, crop=10**9)
    mine.save(path)
    prepared = prepare_text(source(stories), TokenizerSection(file=str(path), vocab=270))
    assert prepared.tokenizer.sha256 == mine.sha256
    with pytest.raises(DataError, match=r"set tokenizer\.vocab to 270"):
        prepare_text(source(stories), TokenizerSection(file=str(path), vocab=280))


def test_an_edit_in_place_is_noticed(stories):
    first = prepare_text(source(stories), TOKENIZER)
    stories.write_text(stories.read_text().replace("once", "ONCE"))
    edited = prepare_text(source(stories), TOKENIZER)
    assert edited.identity != first.identity
    assert "ONCE" in documents(edited, "train")[0]


def test_a_cut_tokenizer_is_trained_again(stories, lap_cache):
    first = prepare_text(source(stories), TOKENIZER)
    (path,) = (lap_cache / "tokenizers").glob("*/tokenizer.json")
    path.write_bytes(path.read_bytes()[:-10])
    assert prepare_text(source(stories), TOKENIZER).identity == first.identity


CHILD = """
import os, sys
from pathlib import Path
from lapcli.data import token_store
from lapcli.data.text import tokenizer, tokens
from lapcli.recipe.schema import TextSource, TokenizerSection

def die(*_, **__):
    os.kill(os.getpid(), 9)

def counted(*arguments):
    with open(sys.argv[2] + ".builds", "a") as file:
        file.write("x")
    return build(*arguments)

build, tokens._tokenise = tokens._tokenise, counted
match sys.argv[1]:
    case "tokenizer": tokenizer.Tokenizer.save = die
    case "index": token_store.StoreWriter.close = die
    case "rename":
        rename = Path.rename
        Path.rename = lambda old, new: die() if old.parts[-2] == "text" else rename(old, new)
print(tokens.prepare_text(TextSource(train=sys.argv[2]), TokenizerSection(vocab=280)).identity)
"""


def child(fault, path, cache):
    return start_process(
        [sys.executable, "-c", CHILD, fault, str(path)],
        env={**os.environ, "LAP_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_build_never_looks_finished(stories, lap_cache, monkeypatch):
    faults = ["tokenizer", "index", "rename"]
    children = [child(fault, stories, lap_cache / fault) for fault in faults]
    whole = prepare_text(source(stories), TOKENIZER)
    for fault, process in zip(faults, children, strict=True):
        process.communicate(timeout=HANG)
        assert process.returncode == -9, fault
        monkeypatch.setenv("LAP_CACHE", str(lap_cache / fault))
        finished = [path for path in (lap_cache / fault).glob("text/*") if path.suffix not in (".lock", ".unfinished")]
        assert finished == [], fault
        assert "the first run tokenises" in describe_source(source(stories), TOKENIZER)
        again = prepare_text(source(stories), TOKENIZER)
        assert again.identity == whole.identity
        assert list((lap_cache / fault).rglob("*.unfinished")) == []


def test_two_processes_at_once_build_once(stories, tmp_path):
    children = [child("none", stories, tmp_path / "cache") for _ in range(2)]
    first, second = (process.communicate(timeout=HANG)[0] for process in children)
    assert first == second
    assert len(first.strip()) == 64
    assert (tmp_path / "stories.jsonl.builds").read_text() == "x"


def test_the_second_start_reads_no_text(stories, monkeypatch):
    read = []
    before = corpus.read_documents

    def counted(*arguments, **options):
        read.append(arguments)
        return before(*arguments, **options)

    monkeypatch.setattr(corpus, "read_documents", counted)
    prepare_text(source(stories), TOKENIZER)
    first = len(read)
    assert first > 0
    prepare_text(source(stories), TOKENIZER)
    assert len(read) == first


def test_progress_counts_up_to_everything(stories):
    seen = []
    prepare_text(source(stories), TOKENIZER, progress=lambda *report: seen.append(report))
    assert {doing for doing, _, _ in seen} == {"counting documents", "training the tokenizer", "tokenising"}
    assert all(0 <= done <= total == stories.stat().st_size for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2]


def test_describing_touches_nothing(stories, lap_cache):
    assert "the first run tokenises" in describe_source(source(stories), TOKENIZER)
    assert "not usable as it is: there is no nowhere.txt" in describe_source(source("nowhere.txt"), TOKENIZER)
    assert "built-in text" in describe_source(TextSource(train="builtin"), TOKENIZER)
    hub = TextSource(train="hub:a/b", files="s_{00..39}.parquet")
    assert "40 files of the hub data set a/b, s_00.parquet to s_39.parquet" in describe_source(hub, TOKENIZER)
    assert list(lap_cache.iterdir()) == []
    prepare_text(source(stories), TOKENIZER)
    assert "tokenised already" in describe_source(source(stories), TOKENIZER)


def test_real_text_comes_back_whole(test_data):
    path = test_data / "text" / "tinyshakespeare.txt"
    prepared = prepare_text(source(path, validation=0.1), TokenizerSection(vocab=1024, train_crop=10**9))
    (train,), (held,) = documents(prepared, "train"), documents(prepared, "validation")
    assert train + held == path.read_text()
    lengths = prepared.tokenizer.byte_lengths()
    assert lengths[prepared.train.read(0, len(prepared.train))].sum() == len(train.encode())


def test_real_documents_of_a_jsonl_file(test_data):
    path = test_data / "text" / "fineweb_edu_docs.jsonl"
    prepared = prepare_text(source(path, crop=2000), TokenizerSection(vocab=2048))
    texts = [json.loads(line)["text"][:2000] for line in path.read_text().splitlines()]
    assert sorted(documents(prepared, "train") + documents(prepared, "validation")) == sorted(texts)
