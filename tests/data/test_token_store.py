import hashlib
import logging
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import TOKENIZER, documents, flip, source, write_stories

from lapcli.data import token_store
from lapcli.data.text import tokenizer as tokenizer_module
from lapcli.data.text.tokenizer import SPECIAL_TOKENS, tokenizer_from_ranks, train_tokenizer
from lapcli.data.text.tokens import prepare_text
from lapcli.data.token_store import (
    DocumentStream,
    ShardWriter,
    StoreWriter,
    TokenStore,
    TokenStream,
    token_dtype,
)
from lapcli.runtime.errors import DataError


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=12),
    shard=st.integers(1, 25),
    vocab=st.sampled_from([65_536, 65_537]),
    reads=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), max_size=10),
)
def test_shards_are_one_stream(tmp_path_factory, lengths, shard, vocab, reads):
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.random.default_rng(0).integers(0, vocab, sum(lengths))
    writer = ShardWriter(folder, "train", token_dtype(vocab))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store, "SHARD_TOKENS", shard)
        for part in np.split(tokens, np.cumsum(lengths)):
            writer.append(part)
    writer.close()
    stream = TokenStream(folder, writer.shards, token_dtype(vocab))
    assert len(stream) == len(tokens)
    assert all(count <= shard for _, count, _ in writer.shards)
    for number, (name, _, sha256) in enumerate(writer.shards):
        ids = tokens[number * shard : (number + 1) * shard].astype(token_dtype(vocab))
        assert (folder / name).read_bytes() == ids.tobytes()
        assert sha256 == hashlib.sha256(ids.tobytes()).hexdigest()
    for start, count in reads:
        if start + count <= len(tokens):
            got = stream.read(start, count)
            assert got.dtype == np.int64
            assert got.tolist() == tokens[start : start + count].tolist()
        else:
            with pytest.raises(IndexError):
                stream.read(start, count)


def test_a_read_is_a_copy(tmp_path):
    writer = ShardWriter(tmp_path, "train", token_dtype(100))
    writer.append(np.arange(10))
    writer.close()
    stream = TokenStream(tmp_path, writer.shards, token_dtype(100))
    stream.read(0, 10)[:] = 7
    assert stream.read(0, 10).tolist() == list(range(10))


def test_two_bytes_up_to_65536_tokens():
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4


def test_a_shard_is_verified_once_and_only_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "SHARD_TOKENS", 4)
    writer = ShardWriter(tmp_path, "train", token_dtype(100))
    writer.append(np.arange(10))
    writer.close()
    hashed, sha256_of_file = [], token_store.sha256_of_file
    monkeypatch.setattr(token_store, "sha256_of_file", lambda path: hashed.append(path.name) or sha256_of_file(path))
    stream = TokenStream(tmp_path, writer.shards, token_dtype(100))
    for _ in range(3):
        stream.read(5, 2)
    assert hashed == ["train-00001.bin"]
    flip(tmp_path / "train-00002.bin", 1)
    assert stream.read(0, 8).tolist() == list(range(8))
    with pytest.raises(DataError, match=r"train-00002\.bin is damaged"):
        stream.read(7, 2)


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin"])
def test_a_damaged_shard_is_named_and_the_next_start_builds_again(tmp_path, caplog, name, is_cut):
    where = source(write_stories(tmp_path / "stories.jsonl"), validation=0.4)
    first = prepare_text(where, TOKENIZER)
    expected = documents(first, "train")
    path = first.folder / name
    if is_cut:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        documents(prepare_text(where, TOKENIZER), "train")
    with caplog.at_level(logging.WARNING):
        again = prepare_text(where, TOKENIZER)
    assert "is damaged" in caplog.text
    assert documents(again, "train") == expected


def test_any_damage_to_tokens_and_tokenizer_is_refused_or_repaired(tmp_path, lap_cache):
    """Random bytes of any of these files: the undamaged data come out, or an error."""
    stories = write_stories(tmp_path / "stories.jsonl")
    whole = prepare_text(source(stories), TOKENIZER)
    expected = documents(whole, "train"), documents(whole, "validation"), whole.tokenizer.sha256
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(20):
        path = draw.choice(sorted(path for path in lap_cache.rglob("*.*") if path.name[-4:] in (".bin", "json")))
        if path.name == "index.json":
            continue
        flip(path, draw.randrange(path.stat().st_size), draw.randrange(1, 256))
        for _ in range(2):  # what is refused is built again by the next start
            try:
                found = prepare_text(source(stories), TOKENIZER)
                got = documents(found, "train"), documents(found, "validation")
            except DataError as error:
                if "is damaged" not in str(error):
                    raise
                continue
            assert (*got, found.tokenizer.sha256) == expected
            assert found.identity == whole.identity
            break
        else:
            raise AssertionError("it was not repaired")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two\n\nthree, four!\n 5 six\r\n\tseven's\n"] * 9, 290, max_chars=10**9, crop=10**9)


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("one tw\n\n\n\r\t\u00a0\u2028é1!'s_\u0301的")), limit=st.integers(1, 8))
def test_a_document_in_pieces_has_the_tokens_of_the_whole(tokenizer, text, limit):
    parts = list(tokenizer_module.cut_at_blanks(text, limit))
    assert "".join(parts) == text
    assert [id_ for part in parts for id_ in tokenizer.encode(part)] == tokenizer.encode(text)


def test_long_documents_are_cut(tokenizer):
    text = "line of text\n" * 50_000
    pieces = list(tokenizer.encode_stream(["short", text, "short"]))
    assert [begins for begins, _ in pieces] == [True, True, *[False] * (len(pieces) - 3), True]
    assert max(len(tokenizer.decode(ids)) for _, ids in pieces) <= tokenizer_module.PIECE + 13
    assert [id_ for _, ids in pieces[1:-1] for id_ in ids] == tokenizer._inner.encode(text).ids


def test_a_long_document_has_its_ids_with_another_split_pattern():
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"\n\n": 256, b"on": 257}
    other = tokenizer_from_ranks(ranks, gpt2, {name: 258 + n for n, name in enumerate(SPECIAL_TOKENS)})
    text = "one two.\n\nthree\n\n" * 9000  # several pieces; GPT-2's pattern splits the newlines before a word
    ((begins, ids),) = other.encode_stream([text])
    assert begins
    assert 256 not in ids[:-1]


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    shard=st.integers(1, 25),
    order=st.randoms(use_true_random=False),
    read=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_documents_in_any_order_are_one_stream(tmp_path_factory, lengths, shard, order, read):
    folder = tmp_path_factory.mktemp("store")
    texts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store, "SHARD_TOKENS", shard)
        writer = StoreWriter(folder, 100, columns=2)
        for number, ids in enumerate(texts):
            writer.append(ids)
            writer.end(number)
        writer.close("key", fact=5)
    store = TokenStore(folder)
    assert store.lengths.tolist() == lengths
    assert store.numbers[:, 1].tolist() == list(range(len(lengths)))
    assert store.index["fact"] == 5
    chosen = order.sample(range(len(lengths)), order.randint(1, len(lengths)))
    expected = np.concatenate([texts[number] for number in chosen])
    stream = DocumentStream(store, np.array(chosen))
    assert len(stream) == len(expected)
    first, end = sorted(round(place * len(expected)) for place in read)
    assert stream.read(first, end - first).tolist() == expected[first:end].tolist()
    with pytest.raises(IndexError):
        stream.read(first, len(expected) + 1)
