import json
import sys

import numpy as np
import pytest
import rustbpe
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run_process

from lapcli.data.text import tokenizer as module
from lapcli.data.text.tokenizer import (
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


def our_tokens(tokenizer):
    return [tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size - len(SPECIAL_TOKENS))]


def same_as_rustbpe(texts, vocab):
    ours, other = train_tokenizer(texts, vocab, max_chars=10**9, crop=10**9), rustbpe.Tokenizer()
    other.train_from_iterator(iter(texts), vocab - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    theirs = [bytes(token) for token, _ in sorted(other.get_mergeable_ranks(), key=lambda pair: pair[1])]
    assert our_tokens(ours) == theirs, "not even ties among equally frequent pairs differ"
    assert [ours.encode(text) for text in texts] == [other.encode(text) for text in texts]


def test_merges_and_ids_are_those_of_rustbpe():
    same_as_rustbpe(sample(), 400)


def test_merges_and_ids_are_those_of_rustbpe_on_real_text(test_data):
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
def test_any_text_comes_back_and_is_never_special(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < tokenizer.bos
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())


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


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("one tw\n\n\n\r\t\u00a0\u2028é1!'s_\u0301的")), limit=st.integers(1, 8))
def test_a_document_in_pieces_has_the_tokens_of_the_whole(tokenizer, text, limit):
    parts = list(module.cut_at_blanks(text, limit))
    assert "".join(parts) == text
    assert [id_ for part in parts for id_ in tokenizer.encode(part)] == tokenizer.encode(text)


def test_long_documents_are_cut(tokenizer, monkeypatch):
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


def test_a_long_document_has_its_ids_with_another_split_pattern():
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"\n\n": 256, b"on": 257}
    other = module.tokenizer_from_ranks(ranks, gpt2, {name: 258 + n for n, name in enumerate(SPECIAL_TOKENS)})
    text = "one two.\n\nthree\n\n" * 9000  # several pieces; GPT-2's pattern splits the newlines before a word
    ((begins, ids),) = other.encode_stream([text])
    assert begins
    assert 256 not in ids[:-1]


def test_a_word_of_any_length_is_cut_for_training():
    """The trainer would take minutes for this one; ordinary text is not changed."""
    text = ["the cat sat on the mat while one dog ran round it, " * 20]
    assert train_tokenizer([*text, "\x00" * 10**6], 280, max_chars=10**7, crop=10**7).vocab_size == 280
    pieces = "".join(text) + "x" * 5000 + " " * 5000 + "-" * 5000
    assert "".join(module._excerpts([pieces], 10**6, 10**6)) == pieces
    assert list(module._excerpts(text, 10**6, 10**6)) == text


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": "1.0"}'])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)
