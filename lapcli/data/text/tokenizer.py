"""The tokenizer: byte-level BPE with GPT-4-style splitting and nine special tokens.

Text is split into pieces (SPLIT_PATTERN), each piece is its UTF-8 bytes, and the learned merges join them. Ids 0-255
are the bytes themselves, then come the merges in the order in which they were learned, and the last nine are special
tokens. Tests compare the ids with those of rustbpe, nanochat's trainer: they are the same, ties included.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from lapcli.runtime.errors import DataError
from lapcli.runtime.files import write_text

SPECIAL_TOKENS: tuple[str, ...] = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)

# GPT-4's pattern, but digits in pairs instead of triples. By priority: contractions; letters with one other character
# before them; one or two digits; punctuation with a space before and newlines after; blanks that end in a newline;
# other blanks.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# A text that is not reproduced by tokenizers that alter text (lower-casing, normalising, a leading space).
PROBE = "Zwölf  Boxkämpfer\r\n\te\u0301 \u00e9\u3000\U0001f600\x00 it's 1234<|bos|>\n\n"


def _byte_characters() -> list[str]:
    """Return the character by which `tokenizers` writes each byte: itself if printable, else one above U+00FF."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


class Tokenizer:
    """Converts text to ids and back. Text is never encoded to a special token."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may have both switched on, which would change the lengths of encoded texts.
        inner.no_padding()
        inner.no_truncation()
        # Not part of the saved file: without it "<|bos|>" inside a document would become the special token.
        inner.encode_special_tokens = True
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()
        self._bytes = _bytes_of_ids(inner)
        self._splits_by_our_pattern = json.dumps(SPLIT_PATTERN) in inner.to_str()
        self._special = _special_ids(self.vocab_size - len(SPECIAL_TOKENS))
        self.bos = self._special["<|bos|>"]
        self.sha256 = hashlib.sha256(inner.to_str().encode()).hexdigest()

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot read the tokenizer {path} ({error}); restore it, or check tokenizer.file"
            ) from None
        return cls.from_text(text, path)

    @classmethod
    def from_text(cls, text: str, path: str | Path) -> "Tokenizer":
        """Load the content of a tokenizer.json; errors name `path`."""
        try:
            tokenizer = cls(tokenizers.Tokenizer.from_str(text))
            if tokenizer.decode_bytes(tokenizer.encode(PROBE)) != PROBE.encode():
                raise DataError("it alters text while encoding it")
        except Exception as error:  # the library raises plain Exception for anything that it cannot read
            raise DataError(
                f"{path} is not a tokenizer that lap can use: {str(error)[:200]}; name another, or leave "
                "tokenizer.file out to train one"
            ) from None
        return tokenizer

    def save(self, path: str | Path) -> None:
        write_text(Path(path), self._inner.to_str())

    def special(self, name: str) -> int:
        return self._special[name]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        encoded: list[list[int]] = []
        for begins, ids in self.encode_stream(texts):
            if begins:
                encoded.append(ids)
            else:
                encoded[-1] += ids
        return encoded

    def encode_stream(self, texts: Iterable[str]) -> Iterator[tuple[bool, list[int]]]:
        """Encode texts on all cores; yield the ids of each piece of a text, after whether it begins the text.

        Long texts are split into pieces that give the same ids: unsplit they would take 200 bytes of memory per
        byte. Where that is possible depends on the split pattern: with a foreign pattern a text is not split. A lone
        surrogate, which has no UTF-8 bytes, becomes U+FFFD.
        """
        waiting: list[tuple[bool, str]] = []
        characters = 0
        for text in texts:
            clean = LONE_SURROGATE.sub("\ufffd", text)
            for number, piece in enumerate(cut_at_blanks(clean, PIECE) if self._splits_by_our_pattern else [clean]):
                waiting.append((number == 0, piece))
                characters += len(piece)
                if characters > ENCODED_AT_ONCE:
                    yield from self._encoded(waiting)
                    waiting, characters = [], 0
        yield from self._encoded(waiting)

    def _encoded(self, pieces: Sequence[tuple[bool, str]]) -> Iterator[tuple[bool, list[int]]]:
        encodings = self._inner.encode_batch_fast([piece for _, piece in pieces], add_special_tokens=False)
        yield from ((begins, encoding.ids) for (begins, _), encoding in zip(pieces, encodings, strict=True))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode to text; bytes that are not valid UTF-8, such as those of a truncated character, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode any ids to their exact bytes; a special token becomes its name."""
        numbers = [int(id_) for id_ in ids]
        if unknown := [id_ for id_ in numbers if not 0 <= id_ < self.vocab_size]:  # -1 would be the last special token
            raise ValueError(f"{unknown[0]} is not a token id of a vocabulary of {self.vocab_size}")
        return b"".join(self._bytes[id_] for id_ in numbers)

    def byte_lengths(self) -> np.ndarray:
        """Return the number of text bytes of each id, int32, 0 for special tokens (for bits per byte)."""
        # Raw bytes, as in nanochat's later version: the earlier one decodes each id to text, where a part of a
        # character counts as the 3 bytes of U+FFFD, which makes bits per byte too low.
        ordinary = [len(raw) for raw in self._bytes[: -len(SPECIAL_TOKENS)]]
        return np.array(ordinary + [0] * len(SPECIAL_TOKENS), dtype=np.int32)


PIECE = 1 << 16  # characters that one core encodes at a time
ENCODED_AT_ONCE = 1 << 22  # characters: enough work for all cores, few enough for memory
_UNBROKEN = 1 << 20
_BLANK = re.compile(r"(?<=\S) (?=\S)|(?<=\n)(?=\S)")


def cut_at_blanks(text: str, length: int) -> Iterator[str]:
    """Split text into pieces of at least `length` characters where SPLIT_PATTERN splits anyway.

    That is before a single space between other characters, which can only begin a piece, and after a newline, which
    can only end one. Text without either for a million characters is split nevertheless.
    """
    start = 0
    while len(text) - start > length:
        first = start + length
        blank = _BLANK.search(text, first, first + _UNBROKEN)
        end = blank.start() if blank else min(first + _UNBROKEN, len(text))
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def _special_ids(ordinary: int) -> dict[str, int]:
    return {name: ordinary + number for number, name in enumerate(SPECIAL_TOKENS)}


def _bytes_of_ids(inner: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of every id; DataError for a tokenizer that is not byte-level or lacks our special tokens."""
    size = inner.get_vocab_size()
    added = {token.content: id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special}
    if added != _special_ids(size - len(added)) or len(inner.get_added_tokens_decoder()) != len(added):
        raise DataError(f"its last ids must be the special tokens {' '.join(SPECIAL_TOKENS)} and no others")
    try:
        table = {
            id_: token.encode() if token in added else bytes(BYTE_OF_CHARACTER[character] for character in token)
            for token, id_ in inner.get_vocab().items()
        }
    except KeyError:
        raise DataError("its tokens are not byte-level") from None
    # Embeddings have a row for each id below the size.
    if table.keys() != set(range(size)) or not {bytes([byte]) for byte in range(256)} <= set(table.values()):
        raise DataError("its ids have gaps, or some of the 256 bytes are missing")
    if getattr(inner.model, "dropout", None):
        raise DataError("it has BPE dropout, which makes encoding random")
    return [table[id_] for id_ in range(size)]


def _assemble(model: models.BPE, pattern: str = SPLIT_PATTERN, special: Sequence[str] = ()) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            # Its own regex is GPT-2's, which would split our pieces again.
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return inner


#: The trainer takes quadratic time in the length of a word: 46 seconds for 200,000 bytes. No real word is that long;
#: longer runs, such as the rest of a file that a crash filled with one byte, are split.
_LONG_RUN = re.compile(r"(\w{2048}|\s{2048}|[^\w\s]{2048})")


def train_tokenizer(texts: Iterable[str], vocab: int, *, max_chars: int, crop: int) -> Tokenizer:
    """Learn `vocab` tokens, special ones included, from the first `crop` characters of each text, up to `max_chars`."""
    ordinary = vocab - len(SPECIAL_TOKENS)
    learner = _assemble(models.BPE())
    # Ties among equally frequent pairs go to the smaller ids. The trainer would number the bytes by their printable
    # characters; handing them over as "special" tokens numbers them by value, which breaks ties as in rustbpe.
    trainer = trainers.BpeTrainer(vocab_size=ordinary, special_tokens=BYTE_CHARACTERS, show_progress=False)
    learner.train_from_iterator(_excerpts(texts, max_chars, crop), trainer)
    learned = json.loads(learner.to_str())["model"]
    if len(learned["vocab"]) < ordinary:
        possible = len(learned["vocab"]) + len(SPECIAL_TOKENS)
        raise DataError(
            f"the text is too small for a vocabulary of {vocab:,} tokens: it gives {possible:,}; set tokenizer.vocab "
            f"to {possible} or less, give more text, or raise tokenizer.train_crop (now {crop:,} characters a document)"
        )
    # Rebuilt, because in the trainer the 256 bytes are special tokens too.
    model = models.BPE(vocab=learned["vocab"], merges=[tuple(merge) for merge in learned["merges"]])
    return Tokenizer(_assemble(model, special=SPECIAL_TOKENS))


def tokenizer_from_ranks(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> Tokenizer:
    """Build a tokenizer from tiktoken's tables; DataError if its last tokens are not our special ones.

    tiktoken merges any two neighbours whose bytes together are a token, the one of lowest rank first. So each token
    gets a merge for every two tokens that it can be split into.
    """
    ordered = sorted(ranks, key=lambda token: ranks[token])
    if [ranks[token] for token in ordered] != list(range(len(ordered))) or special != _special_ids(len(ordered)):
        raise DataError(f"its last ids must be the special tokens {' '.join(SPECIAL_TOKENS)} and no others")
    shown = {token: "".join(BYTE_CHARACTERS[byte] for byte in token) for token in ordered}
    merges = []
    for token in ordered:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        fitting = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        fitting.sort(key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
        merges += [(shown[left], shown[right]) for left, right in fitting]
    try:
        model = models.BPE(vocab={shown[token]: ranks[token] for token in ordered}, merges=merges)
        return Tokenizer(_assemble(model, pattern, SPECIAL_TOKENS))
    except Exception as error:  # the library raises plain Exception, here for a pattern that it cannot read
        raise DataError(f"no tokenizer can be built from its tables ({str(error)[:200]})") from None


def _excerpts(texts: Iterable[str], max_chars: int, crop: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        excerpt = LONE_SURROGATE.sub("\ufffd", text[:crop])
        yield from filter(None, _LONG_RUN.split(excerpt))
        seen += len(excerpt)
        # After the text that crosses the limit, which is still used, as in nanochat's scripts/tok_train.py.
        if seen > max_chars:
            return
