import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.text import shards
from lapcli.data.text import tokenizer as tokenizer_module
from lapcli.data.text.shards import DocumentWriter, ShardWriter, TokenStream, shards_are_whole, token_dtype
from lapcli.data.text.tokenizer import SPECIAL_TOKENS, tokenizer_from_ranks, train_tokenizer


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
    writer = ShardWriter(folder, "train", token_dtype(vocab), shard_tokens=shard)
    for part in np.split(tokens, np.cumsum(lengths)):
        writer.append(part)
    content = writer.close()
    stream = TokenStream(folder, writer.shards, token_dtype(vocab))
    assert len(stream) == len(tokens)
    assert all(count <= shard for _, count in writer.shards)
    assert content == hashlib.sha256(tokens.astype(token_dtype(vocab)).tobytes()).hexdigest()
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


def test_a_short_shard_is_noticed(tmp_path):
    writer = ShardWriter(tmp_path, "train", token_dtype(100), shard_tokens=4)
    writer.append(np.arange(10))
    writer.close()
    assert shards_are_whole(tmp_path, writer.shards, token_dtype(100))
    with (tmp_path / "train-00001.bin").open("r+b") as file:
        file.truncate(7)
    assert not shards_are_whole(tmp_path, writer.shards, token_dtype(100))
    (tmp_path / "train-00001.bin").unlink()
    assert not shards_are_whole(tmp_path, writer.shards, token_dtype(100))


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
    assert max(map(len, tokenizer.pieces(text))) <= tokenizer_module.PIECE + 13
    assert len(list(tokenizer.pieces(text))) > 5


def test_a_long_document_has_its_ids_with_another_split_pattern(tokenizer, tmp_path):
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"\n\n": 256, b"on": 257}
    other = tokenizer_from_ranks(ranks, gpt2, {name: 258 + n for n, name in enumerate(SPECIAL_TOKENS)})
    text = "one two.\n\nthree\n\n" * 9000  # several pieces; GPT-2's pattern splits the newlines before a word
    ids, _ = written(tmp_path, other, [text], seed=None)
    assert ids == [other.bos, *other.encode(text)]
    assert 256 not in ids[:-1]


def written(folder, tokenizer, texts, seed):
    writer = DocumentWriter(folder, "train", tokenizer, seed)
    for text in texts:
        writer.add([text])
    names, _, content = writer.finish()
    assert writer.documents == len(texts)
    stream = TokenStream(folder, names, token_dtype(tokenizer.vocab_size))
    assert sorted(path.name for path in folder.iterdir()) == sorted(name for name, _ in names)
    return stream.read(0, len(stream)).tolist(), content


TEXTS = ["one two", "three, four!\n" * 30, "x", "one\n" * 7, *(f"text {i} <|bos|>" for i in range(40))]


def split_at_bos(tokenizer, ids):
    places = [i for i, id_ in enumerate(ids) if id_ == tokenizer.bos]
    assert places[0] == 0
    return [tokenizer.decode(part[1:]) for part in np.split(np.array(ids), places[1:])]


def test_in_order_with_bos_before_each(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "ENCODED_AT_ONCE", 20)
    monkeypatch.setattr(tokenizer_module, "PIECE", 10)
    ids, _ = written(tmp_path, tokenizer, TEXTS, seed=None)
    assert ids == [id_ for text in TEXTS for id_ in [tokenizer.bos, *tokenizer.encode(text)]]


def test_shuffled_by_seed_with_every_document_once(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards.ShardWriter.__init__, "__defaults__", (50,))  # several shards
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        (tmp_path / str(number)).mkdir()
        ids, _ = written(tmp_path / str(number), tokenizer, TEXTS, seed)
        orders.append(split_at_bos(tokenizer, ids))
        assert sorted(orders[-1]) == sorted(TEXTS)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != TEXTS
