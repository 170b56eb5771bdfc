import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.text import documents, shards
from lapcli.data.text.documents import DocumentWriter, pieces
from lapcli.data.text.shards import TokenStream, token_dtype
from lapcli.data.text.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two\n\nthree, four!\n 5 six\r\n\tseven's\n"] * 9, 290, max_chars=10**9, crop=10**9)


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("one tw\n\n\n\r\t\u00a0\u2028é1!'s_\u0301的")), limit=st.integers(0, 8))
def test_a_document_in_pieces_has_the_tokens_of_the_whole(tokenizer, text, limit):
    parts = list(pieces(text, limit))
    assert "".join(parts) == text
    assert [id_ for part in parts for id_ in tokenizer.encode(part)] == tokenizer.encode(text)


def test_long_documents_are_cut():
    text = "line of text\n" * 50_000
    assert max(map(len, pieces(text))) <= documents.PIECE + 13
    assert len(list(pieces(text))) > 5


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
    monkeypatch.setattr(documents, "ENCODED_AT_ONCE", 20)
    monkeypatch.setattr(documents, "PIECE", 10)
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
