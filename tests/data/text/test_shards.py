import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.text.shards import ShardWriter, TokenStream, shards_are_whole, token_dtype


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
