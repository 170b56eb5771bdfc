import json

import numpy as np
import pytest
import rustbpe
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.text import tokenizer as module
from lapcli.data.text.tokenizer import (
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    Tokenizer,
    train_tokenizer,
)
from lapcli.runtime.errors import DataError

ODD_TEXT = (
    "It's WE'LL they\u2019re 'S 'ſ\r\n\r\n  \t\n\u00a0\u2003x\u2028y\u0085z \u200b\u180e\n"
    "12345 ١٢٣ Ⅷ ½ 你好 นี่ e\u0301 \U0001f468\u200d\U0001f469 \x00\x1f\x7f !!\n\n??\r\n... trailing   \n   lead\n \n"
)


def sample():
    words = ["token", "the", "tea", "stew", "won't", "1234", "Über", "naïve", "  ", "\n\n", "you're", "...", "的"]
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(words, size=40)) for _ in range(60)] + [ODD_TEXT] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(sample(), 400, max_chars=10**9, crop=10**9)


def our_tokens(tokenizer):
    return [tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size - len(SPECIAL_TOKENS))]


def same_as_rustbpe(texts, vocab):
    ours, other = train_tokenizer(texts, vocab, max_chars=10**9, crop=10**9), rustbpe.Tokenizer()
    other.train_from_iterator(iter(texts), vocab - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    theirs = [bytes(token) for token, _ in sorted(other.get_mergeable_ranks(), key=lambda pair: pair[1])]
    assert our_tokens(ours) == theirs, "even ties between equally frequent pairs agree"
    assert [ours.encode(text) for text in texts] == [other.encode(text) for text in texts]


def test_merges_and_ids_match_rustbpe():
    same_as_rustbpe(sample(), 400)


def test_merges_and_ids_match_rustbpe_on_real_text(test_data):
    same_as_rustbpe([(test_data / "text" / "tinyshakespeare.txt").read_text()], 3000)


def test_ids_are_bytes_then_merges_then_the_special_tokens(tokenizer):
    assert tokenizer.vocab_size == 400
    assert [tokenizer.decode_bytes([byte]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.special(name) for name in SPECIAL_TOKENS] == list(range(391, 400))
    assert tokenizer.bos == 391
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("hel\ud800lo")]) == "<|bos|>hel\ufffdlo"
    for id_ in (-1, 400):
        with pytest.raises(ValueError, match="not a token id"):
            tokenizer.decode([id_])


@settings(deadline=None, max_examples=300)
@given(text=st.text() | st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "a", "\r\n", "é"])).map("".join))
def test_any_text_round_trips_without_special_tokens(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < tokenizer.bos
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())


def edited(tokenizer, path, change):
    tokenizer.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it["added_tokens"].pop(), "last ids must be the special tokens"),
        (lambda it: it.update(normalizer={"type": "Lowercase"}), "alters text"),
        (lambda it: it["model"].update(dropout=0.1), "dropout"),
    ],
)
def test_a_foreign_tokenizer_is_refused(tokenizer, tmp_path, change, message):
    path = tmp_path / "tokenizer.json"
    edited(tokenizer, path, change)
    with pytest.raises(DataError, match=message) as refused:
        Tokenizer.from_file(path)
    assert str(path) in str(refused.value)


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("one tw\n\n\n\r\t\u00a0\u2028é1!'s_\u0301的")), limit=st.integers(1, 8))
def test_a_document_in_pieces_has_the_same_tokens(tokenizer, text, limit):
    parts = list(module.cut_at_blanks(text, limit))
    assert "".join(parts) == text
    assert [id_ for part in parts for id_ in tokenizer.encode(part)] == tokenizer.encode(text)


def test_long_documents_are_split(tokenizer, monkeypatch):
    text = "line of text\n" * 20_000
    pieces = list(tokenizer.encode_stream(["short", text, "short"]))
    assert [begins for begins, _ in pieces] == [True, True, *[False] * (len(pieces) - 3), True]
    assert max(len(tokenizer.decode(ids)) for _, ids in pieces) <= module.PIECE + 13
    whole = tokenizer._inner.encode(text).ids
    assert [id_ for _, ids in pieces[1:-1] for id_ in ids] == whole
    monkeypatch.setattr(module, "ENCODED_AT_ONCE", 64)
    assert tokenizer.encode_batch(["short", text])[1] == whole
    monkeypatch.setattr(module, "_UNBROKEN", 100)  # beyond which a text without a blank is cut anywhere
    monkeypatch.setattr(module, "PIECE", 1)
    assert tokenizer.decode(tokenizer.encode("x" * 5000)) == "x" * 5000


def test_long_words_are_split_for_training():
    """The trainer would take minutes for this word; ordinary text is not changed."""
    text = ["the cat sat on the mat while one dog ran round it, " * 20]
    assert train_tokenizer([*text, "\x00" * 10**6], 280, max_chars=10**7, crop=10**7).vocab_size == 280
    pieces = "".join(text) + "x" * 5000 + " " * 5000 + "-" * 5000
    assert "".join(module._excerpts([pieces], 10**6, 10**6)) == pieces
    assert list(module._excerpts(text, 10**6, 10**6)) == text
