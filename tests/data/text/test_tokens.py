import json
import os
import subprocess
import sys

import pytest
from support import HANG, start_process
from text_support import TOKENIZER, documents, jsonl, source, story, write_stories

from lapcli.data.text import tokens
from lapcli.data.text.tokenizer import train_tokenizer
from lapcli.data.text.tokens import prepare_text
from lapcli.recipe.schema import TokenizerSection
from lapcli.runtime.errors import DataError


@pytest.fixture
def stories(tmp_path):
    return write_stories(tmp_path / "stories.jsonl")


@pytest.mark.parametrize("shuffled", [True, False])
def test_every_document_is_in_exactly_one_split(stories, shuffled):
    prepared = prepare_text(source(stories, validation=0.1, shuffled=shuffled), TOKENIZER)
    train, held = documents(prepared, "train"), documents(prepared, "validation")
    assert len(train) == 90
    assert sorted(train + held) == sorted(story(i) for i in range(100))
    assert (train == [story(i) for i in range(90)]) == shuffled


def test_the_last_of_several_files_is_held_out(tmp_path):
    for name in "cab":
        jsonl(tmp_path / f"{name}.jsonl", [f"{name} {story(i)}" for i in range(9)])
    prepared = prepare_text(source(tmp_path), TOKENIZER)
    assert sorted(documents(prepared, "validation")) == [f"c {story(i)}" for i in range(9)]
    assert {text[0] for text in documents(prepared, "train")} == {"a", "b"}
    by_list = prepare_text(source(tmp_path, files=["c.jsonl", "b.jsonl"]), TOKENIZER)
    assert {text[0] for text in documents(by_list, "validation")} == {"b"}


def test_parts_are_built_by_file_and_reused_with_other_files(tmp_path, lap_cache, monkeypatch):
    """A part has the same bytes whichever process builds it and whichever parts exist. Small files share a part."""
    monkeypatch.setattr(tokens, "PART_BYTES", 1)
    mine = train_tokenizer([story(1)], 280, max_chars=10**9, crop=10**9)
    for name in "abc":
        jsonl(tmp_path / f"{name}.jsonl", [f"{name} {story(i)}" for i in range(9)])
    two = prepare_text(source(tmp_path, files=["a.jsonl", "b.jsonl"], validation=0.2), mine)
    built = {path: path.stat().st_mtime_ns for path in lap_cache.glob("text/*/*")}
    whole = prepare_text(source(tmp_path, validation=0.2), mine)
    assert built.items() < {path: path.stat().st_mtime_ns for path in lap_cache.glob("text/*/*")}.items()
    for path in lap_cache.glob("text/*/index.json"):
        path.unlink()
    assert prepare_text(source(tmp_path, validation=0.2), mine).identity == whole.identity != two.identity
    monkeypatch.setattr(tokens, "PART_BYTES", 10**6)
    together = prepare_text(source(tmp_path, validation=0.2), mine)
    assert documents(together, "train") == documents(whole, "train")
    assert len(list(lap_cache.glob("text/*/index.json"))) == 3 + 1
    every = [f"{name} {story(i)}" for name in "abc" for i in range(9)]
    assert sorted(documents(whole, "train") + documents(whole, "validation")) == every


def test_one_text_is_split_in_two(tmp_path):
    text = "".join(story(i) + "\r\n" for i in range(100))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    prepared = prepare_text(source(tmp_path / "a.txt"), TOKENIZER)
    (train,), (held,) = documents(prepared, "train"), documents(prepared, "validation")
    assert train + held == text.replace("\r\n", "\n")
    assert 0.03 < len(held) / len(text) < 0.07


def test_no_text_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with pytest.raises(DataError, match=r"no text.*data\.train"):
        prepare_text(source(tmp_path), TOKENIZER)
    write_stories(tmp_path / "0.jsonl")  # the empty file is held out
    with pytest.raises(DataError, match="no text for validation"):
        prepare_text(source(tmp_path), TOKENIZER)


def test_the_tokenizer_never_sees_held_out_text(tmp_path):
    jsonl(tmp_path / "a.jsonl", [story(i) for i in range(30)])
    jsonl(tmp_path / "b.jsonl", ["zqzqzqzqzqzq" * 100])
    prepared = prepare_text(source(tmp_path), TOKENIZER)
    alone = train_tokenizer((story(i) for i in range(30)), 280, max_chars=10**9, crop=10**9)
    assert alone.sha256 == prepared.tokenizer.sha256
    by_fraction = prepare_text(source(tmp_path / "a.jsonl", validation=0.5), TOKENIZER)
    alone = train_tokenizer(sorted(documents(by_fraction, "train")), 280, max_chars=10**9, crop=10**9)
    assert alone.sha256 == by_fraction.tokenizer.sha256


CHILD = """
import os, sys
from pathlib import Path
from lapcli.data import token_store
from lapcli.data.text import tokenizer, tokens
from lapcli.recipe.schema import TextSource, TokenizerSection

def die(*arguments, **options):
    os.kill(os.getpid(), 9)

def counted(*arguments):
    with open(sys.argv[2] + ".builds", "a") as file:
        file.write("x")
    return build(*arguments)

build, tokens._tokenise = tokens._tokenise, counted
match sys.argv[1]:
    case "tokenizer": tokenizer.Tokenizer.save = die
    case "index": token_store.PartWriter.close = die
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


def test_a_killed_build_never_looks_complete(stories, lap_cache, monkeypatch):
    faults = ["tokenizer", "index", "rename"]
    children = [child(fault, stories, lap_cache / fault) for fault in faults]
    whole = prepare_text(source(stories), TOKENIZER)
    for fault, process in zip(faults, children, strict=True):
        process.communicate(timeout=HANG)
        assert process.returncode == -9, fault
        monkeypatch.setenv("LAP_CACHE", str(lap_cache / fault))
        assert prepare_text(source(stories), TOKENIZER).identity == whole.identity
        assert list((lap_cache / fault).rglob("*.unfinished")) == []


def test_the_second_start_reads_no_text(stories, monkeypatch):
    seen = []
    prepare_text(source(stories), TOKENIZER, progress=lambda *report: seen.append(report))
    assert {doing for doing, _, _ in seen} == {"counting documents", "training the tokenizer", "tokenising"}
    assert all(0 <= done <= total == stories.stat().st_size for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2]
    monkeypatch.setattr(tokens, "read_documents", None)
    prepare_text(source(stories), TOKENIZER)


def test_real_text_round_trips(test_data):
    path = test_data / "text" / "tinyshakespeare.txt"
    prepared = prepare_text(source(path, validation=0.1), TokenizerSection(vocab=1024, train_crop=10**9))
    (train,), (held,) = documents(prepared, "train"), documents(prepared, "validation")
    assert train + held == path.read_text()
    lengths = prepared.tokenizer.byte_lengths()
    assert lengths[prepared.train.read(0, len(prepared.train))].sum() == len(train.encode())
    path = test_data / "text" / "fineweb_edu_docs.jsonl"
    prepared = prepare_text(source(path, crop=2000), TokenizerSection(vocab=2048))
    texts = [json.loads(line)["text"][:2000] for line in path.read_text().splitlines()]
    assert sorted(documents(prepared, "train") + documents(prepared, "validation")) == sorted(texts)
