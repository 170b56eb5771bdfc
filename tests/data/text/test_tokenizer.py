import json
import sys

import numpy as np
import pytest
import rustbpe
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run_process

from lapcli.data.text.tokenizer import (
    BYTE_CHARACTERS,
    BYTE_OF_CHARACTER,
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


def rustbpe_tokens(texts, count):
    other = rustbpe.Tokenizer()
    other.train_from_iterator(iter(texts), count, pattern=SPLIT_PATTERN)
    return [bytes(token) for token, _ in sorted(other.get_mergeable_ranks(), key=lambda pair: pair[1])]


def our_tokens(tokenizer):
    return [tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size - len(SPECIAL_TOKENS))]


def test_merges_are_those_of_rustbpe(tokenizer):
    theirs = rustbpe_tokens(sample(), 400 - len(SPECIAL_TOKENS))
    assert set(our_tokens(tokenizer)) == set(theirs)
    assert our_tokens(tokenizer) == theirs, "not even ties among equally frequent pairs differ"


def test_merges_and_ids_are_those_of_rustbpe_on_real_text(test_data):
    text = (test_data / "text" / "tinyshakespeare.txt").read_text()
    ours = train_tokenizer([text], 3000, max_chars=10**9, crop=10**9)
    other = rustbpe.Tokenizer()
    other.train_from_iterator(iter([text]), 3000 - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    theirs = [bytes(token) for token, _ in sorted(other.get_mergeable_ranks(), key=lambda pair: pair[1])]
    assert our_tokens(ours) == theirs
    assert ours.encode(text) == other.encode(text)


def test_ids_are_bytes_then_merges_then_the_special_tokens(tokenizer):
    assert tokenizer.vocab_size == 400
    assert [tokenizer.decode_bytes([byte]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.special(name) for name in SPECIAL_TOKENS] == list(range(391, 400))
    assert tokenizer.bos == 391
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("hello")]) == "<|bos|>hello"


@settings(deadline=None, max_examples=300)
@given(text=st.text() | st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "a", "\r\n", "é"])).map("".join))
def test_any_text_comes_back_and_is_never_special(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < tokenizer.bos
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 399)))
def test_bytes_of_any_ids_are_exact(tokenizer, ids):
    parts = [tokenizer.decode_bytes([id_]) for id_ in ids]
    assert tokenizer.decode_bytes(ids) == b"".join(parts)
    assert tokenizer.decode(ids) == b"".join(parts).decode("utf-8", "replace")
    lengths = [0 if id_ >= tokenizer.bos else len(part) for id_, part in zip(ids, parts, strict=True)]
    assert tokenizer.byte_lengths()[ids].tolist() == lengths


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=30), place=st.integers(0, 30))
def test_a_lone_surrogate_is_replaced(tokenizer, text, place):
    broken = text[:place] + "\ud800" + text[place:]
    assert tokenizer.decode(tokenizer.encode(broken)) == broken.replace("\ud800", "\ufffd")


@pytest.mark.parametrize("id_", [-1, 400])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer, id_):
    with pytest.raises(ValueError, match="not a token id"):
        tokenizer.decode([id_])


def test_a_batch_is_its_texts(tokenizer):
    texts = sample()
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def split(text):
    """The pieces by the library's own regular expressions (Oniguruma)."""
    from lapcli.data.text.tokenizer import _assemble, models

    pieces = _assemble(models.BPE()).pre_tokenizer.pre_tokenize_str(text)
    return [bytes(BYTE_OF_CHARACTER[character] for character in piece).decode() for piece, _ in pieces]


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from(sorted(set(ODD_TEXT)))))
def test_pieces_are_those_of_another_engine_on_odd_blanks(text):
    regex = pytest.importorskip("regex")
    # The engines agree on every assigned character; their Unicode versions differ in the newest letters only.
    assert split(text) == regex.findall(SPLIT_PATTERN, text)


def test_training_stops_at_max_chars_and_crops():
    rare = ["zz" * 50]
    common = ["ab" * 50] * 3
    assert b"zz" not in our_tokens(train_tokenizer(common + rare, 266, max_chars=250, crop=100))
    assert b"zz" in our_tokens(train_tokenizer(rare + common, 267, max_chars=99, crop=100))
    cropped = train_tokenizer(["ab" + "yz" * 100] * 2, 266, max_chars=10**9, crop=2)
    assert b"ab" in our_tokens(cropped)


def test_a_text_too_small_names_a_vocabulary_that_works():
    with pytest.raises(DataError, match=r"set tokenizer\.vocab to 267 or less"):
        train_tokenizer(["abc"], 5000, max_chars=10**9, crop=10**9)
    assert train_tokenizer(["abc"], 267, max_chars=10**9, crop=10**9).vocab_size == 267
    assert train_tokenizer(["abc"], 265, max_chars=10**9, crop=10**9).encode("abc") == [97, 98, 99]
    with pytest.raises(DataError, match="no text"):
        train_tokenizer([], 5000, max_chars=10**9, crop=10**9)


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.encode(ODD_TEXT + "<|bos|>") == tokenizer.encode(ODD_TEXT + "<|bos|>")
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "tokenizer.json"]


def test_another_process_with_other_threads_trains_the_same_bytes(tokenizer, tmp_path):
    code = (
        "import json, sys; from lapcli.data.text.tokenizer import train_tokenizer;"
        "print(train_tokenizer(json.load(sys.stdin), 400, max_chars=10**9, crop=10**9).sha256)"
    )
    done = run_process(
        [sys.executable, "-c", code],
        input=json.dumps(sample()),
        env={"RAYON_NUM_THREADS": "7", "PYTHONHASHSEED": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == tokenizer.sha256


def edited(tokenizer, path, change):
    tokenizer.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it["added_tokens"].pop(), "last ids must be the special tokens"),
        (lambda it: it["added_tokens"].reverse(), "tokenizer"),
        (lambda it: it["added_tokens"][0].update(special=False), "last ids must be the special tokens"),
        (
            lambda it: it["added_tokens"].insert(0, {**it["added_tokens"][0], "id": 65, "content": "A"}),
            "special tokens",
        ),
        (lambda it: it.update(normalizer={"type": "Lowercase"}), "changes the text"),
        (lambda it: it["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "changes the text"),
        (lambda it: it["model"].update(dropout=0.1), "dropout"),
        (lambda it: it.update(pre_tokenizer={"type": "Whitespace"}), "changes the text"),
    ],
)
def test_a_tokenizer_that_is_not_ours_is_refused(tokenizer, tmp_path, change, message):
    path = tmp_path / "tokenizer.json"
    edited(tokenizer, path, change)
    with pytest.raises(DataError, match=message) as refused:
        Tokenizer.from_file(path)
    assert str(path) in str(refused.value)


def test_padding_and_truncation_of_a_file_are_not_applied(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.enable_truncation(3)
    inner.enable_padding(length=100)
    inner.save(str(path))
    assert Tokenizer.from_file(path).encode(ODD_TEXT) == tokenizer.encode(ODD_TEXT)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": "1.0"}'])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json"):
        Tokenizer.from_file(tmp_path / "none.json")


def test_byte_characters_are_the_librarys():
    from tokenizers import pre_tokenizers

    assert sorted(BYTE_CHARACTERS) == sorted(pre_tokenizers.ByteLevel.alphabet())
