"""Documents into a stream of tokens: BOS before each, in source order or shuffled without holding the corpus."""

import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lapcli.data.text.shards import ShardWriter, TokenStream, token_dtype
from lapcli.data.text.split import document_order
from lapcli.data.text.tokenizer import Tokenizer

ENCODED_AT_ONCE = 1 << 22  # characters; enough for every core, few enough to hold
PIECE = 1 << 16  # characters that one core encodes at a time

# No token reaches from a newline into a word (see SPLIT_PATTERN), so a long document may be cut there: encoded in
# pieces, on all cores, it gives the tokens of the whole.
SAFE_CUT = re.compile(r"\n(?=\w)")


def pieces(document: str, limit: int = PIECE) -> Iterator[str]:
    """The document in parts of about `limit` characters that are encoded as in the whole."""
    start = 0
    while len(document) - start > limit and (cut := SAFE_CUT.search(document, start + limit)):
        yield document[start : cut.end()]
        start = cut.end()
    yield document[start:] if start else document


class Written(NamedTuple):
    shards: list[tuple[str, int]]  # file name and tokens of each
    sums: dict[str, str]  # of the blocks of each file
    sha256: str  # of all tokens


class DocumentWriter:
    """Writes `name`'s shards. `seed` shuffles the documents; none keeps their order."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, seed: int | None) -> None:
        self._folder, self._name, self._tokenizer, self._seed = folder, name, tokenizer, seed
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._writer = ShardWriter(folder, name if seed is None else f"unshuffled-{name}", self._dtype)
        self._starts = array("q")  # of each document, in tokens
        self._waiting: list[tuple[bool, str]] = []  # pieces, and whether each begins a document
        self._waiting_characters = 0

    @property
    def documents(self) -> int:
        return len(self._starts)

    def add(self, documents: Iterable[str]) -> None:
        for document in documents:
            for number, piece in enumerate(pieces(document)):
                self._waiting.append((number == 0, piece))
                self._waiting_characters += len(piece)
                if self._waiting_characters > ENCODED_AT_ONCE:
                    self._encode()

    def finish(self) -> Written:
        self._encode()
        content = self._writer.close()
        if self._seed is None:
            return Written(self._writer.shards, self._writer.sums, content)
        return self._shuffle(self._seed)

    def _encode(self) -> None:
        bos = np.array([self._tokenizer.bos], dtype=self._dtype)
        encoded = self._tokenizer.encode_batch([piece for _, piece in self._waiting])
        for (begins, _), ids in zip(self._waiting, encoded, strict=True):
            if begins:
                self._starts.append(self._writer.tokens)
                self._writer.append(bos)
            self._writer.append(np.array(ids, dtype=self._dtype))
        self._waiting, self._waiting_characters = [], 0

    def _shuffle(self, seed: int) -> Written:
        """From a memory map in source order to the final shards: the corpus may be larger than memory."""
        source = TokenStream(self._folder, self._writer.shards, self._dtype)
        ends = np.append(np.frombuffer(self._starts, dtype=np.int64)[1:], len(source))
        final = ShardWriter(self._folder, self._name, self._dtype)
        for document in document_order(self.documents, seed, self._name):
            start = self._starts[document]
            final.append(source.read_raw(start, int(ends[document]) - start))
        content = final.close()
        for name, _ in self._writer.shards:
            (self._folder / name).unlink()
        return Written(final.shards, final.sums, content)
