"""Cached text is what was written, or it is refused and built again."""

import json
import logging
import os
import random
import time

import numpy as np
import pytest
from text_support import TOKENIZER, documents, flip, jsonl, source, story, write_stories

from lapcli.data import checksums
from lapcli.data.text.tokens import prepare_text
from lapcli.runtime.errors import DataError


@pytest.fixture
def stories(tmp_path):
    return write_stories(tmp_path / "stories.jsonl")


def test_an_edit_in_the_middle_with_the_old_time_is_noticed(tmp_path, lap_cache):
    """As after `cp -p` of another version: same name, size, modification time and both ends."""
    path = jsonl(tmp_path / "long.jsonl", [story(i) for i in range(4000)])
    first = prepare_text(source(path), TOKENIZER)
    old = path.stat()
    content = path.read_text()
    assert len(content) > 3 << 16
    edited = content.replace(f"it was number {2000}.", "it was number 9999.")
    assert len(edited) == len(content)
    time.sleep(1.1)  # a file that has not changed for a second has its hash remembered
    prepare_text(source(path), TOKENIZER)
    assert len(list((lap_cache / "hashes").glob("*.json"))) == 1
    path.write_text(edited)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    again = prepare_text(source(path), TOKENIZER)
    assert again.identity != first.identity
    assert sum("9999." in text for text in documents(again, "train") + documents(again, "validation")) == 1


def test_a_remembered_hash_spares_the_reading(stories, monkeypatch):
    monkeypatch.setattr(checksums, "_TICK_NS", -(10**18))  # as if the file had been there for long
    first = prepare_text(source(stories), TOKENIZER)
    monkeypatch.setattr(checksums, "_hash", None)  # reading it again would call this
    assert prepare_text(source(stories), TOKENIZER).folder == first.folder
    (memory,) = (checksums.cache_dir() / "hashes").glob("*.json")
    kept = memory.read_text()
    sha256 = json.loads(kept)["sha256"]
    memory.write_text(kept.replace(sha256, "0" + sha256[1:] if sha256[0] != "0" else "1" + sha256[1:]))
    assert checksums.remembered_sha256(stories) is None


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 512 tokens, so that a small text has many."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 1024)
    return 512


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_flipped_bit_of_a_shard_is_named_when_it_is_read(stories, caplog, part, small_blocks):
    where = source(stories, validation=0.4)
    first = prepare_text(where, TOKENIZER)
    stream = getattr(first, part)
    ids, bad = stream.read(0, len(stream)), 2 * small_blocks
    assert len(ids) > bad + small_blocks
    flip(first.folder / f"{part}-00000.bin", 2 * (bad + 7))
    damaged = getattr(prepare_text(where, TOKENIZER), part)
    assert (damaged.read(0, bad) == ids[:bad]).all(), "the blocks before it are good"
    assert damaged.read(len(ids) - 1, 1) == ids[-1], "and those after it"
    for start in (bad, bad + 8, bad + small_blocks - 1):
        with pytest.raises(DataError, match=rf"{part}-00000.bin is damaged \(bytes 2,048 to 3,072 .* again"):
            damaged.read(start, 1)
    with caplog.at_level(logging.WARNING):
        again = prepare_text(where, TOKENIZER)
    assert "is damaged" in caplog.text
    assert (getattr(again, part).read(0, len(ids)) == ids).all()


def test_each_block_is_hashed_once(stories, monkeypatch, small_blocks):
    stream = prepare_text(source(stories), TOKENIZER).train
    hashed = []
    verify = checksums.CheckedFile._verify

    def counted(self, block):
        hashed.append(block)
        verify(self, block)

    monkeypatch.setattr(checksums.CheckedFile, "_verify", counted)
    stream.read(small_blocks + 5, 3)
    assert hashed == [1], "one block for a read within it"
    for start in range(0, len(stream) - 100, 50):
        stream.read(start, 100)
    stream.read(0, len(stream))
    assert sorted(hashed) == list(range(-(-len(stream) // small_blocks)))


def test_ids_beyond_the_vocabulary_never_come_out(stories):
    """Wrong ids with the right checksums, as a faulty writer would leave them."""
    prepared = prepare_text(source(stories), TOKENIZER)
    name = "train-00000.bin"
    ids = np.fromfile(prepared.folder / name, dtype="<u2")
    ids[5] = 280
    ids.tofile(prepared.folder / name)
    index = checksums.read_index(prepared.folder)
    hasher = checksums.BlockHasher()
    hasher.update(ids.tobytes())
    index["sums"]["train"][name] = hasher.hexdigest()
    checksums.write_index(prepared.folder, index)
    with pytest.raises(DataError, match=r"holds the id 280, but the vocabulary has 280 tokens"):
        prepare_text(source(stories), TOKENIZER).train.read(0, 1)


def test_any_damage_to_the_cache_is_refused_or_repaired(stories, lap_cache):
    """Random bytes of any of its files: the undamaged data come out, or an error."""
    whole = prepare_text(source(stories), TOKENIZER)
    expected = documents(whole, "train"), documents(whole, "validation"), whole.description, whole.tokenizer.sha256
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(40):
        files = sorted(path for path in lap_cache.rglob("*") if path.is_file() and path.suffix != ".lock")
        path = draw.choice(files)
        flip(path, draw.randrange(path.stat().st_size), draw.randrange(1, 256))
        for _ in range(2):  # what is refused is built again by the next start
            try:
                found = prepare_text(source(stories), TOKENIZER)
                got = documents(found, "train"), documents(found, "validation"), found.description
            except DataError as error:
                if "is damaged" not in str(error):
                    raise
                continue
            assert (*got, found.tokenizer.sha256) == expected
            assert found.identity == whole.identity
            break
        else:
            raise AssertionError("it was not repaired")
