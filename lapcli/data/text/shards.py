"""Token ids on disk: documents are written once into shards of bounded size, and read as one memory-mapped stream.

Each document begins with BOS. Documents are in source order, or shuffled without loading the corpus into memory.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from lapcli.data.checksums import BlockHasher, CheckedFile
from lapcli.data.text.corpus import document_order
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.runtime.files import open_to_write, remove

SHARD_TOKENS = 1 << 27  # 256 MiB of 16-bit ids


def token_dtype(vocab: int) -> np.dtype:
    """Return the dtype of ids, little-endian on every machine, so that hashes and copied caches agree."""
    # A vocabulary of 65,536, as nanochat's, still fits: its highest id is 65,535.
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


class ShardWriter:
    """Appends ids to `NAME-00000.bin`, `NAME-00001.bin`, ... and hashes what it writes."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, dtype, shard_tokens
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._blocks = BlockHasher()
        self.shards: list[tuple[str, int]] = []  # file name and tokens of each
        self.sums: dict[str, str] = {}  # checksums of the blocks of each closed file
        self.tokens = 0

    def append(self, ids: np.ndarray) -> None:
        ids = ids.astype(self._dtype, copy=False)
        self.tokens += len(ids)
        while len(ids):
            if self._file is None or self.shards[-1][1] == self._shard_tokens:
                self._next_shard()
            assert self._file is not None
            name, written = self.shards[-1]
            taken = np.ascontiguousarray(ids[: self._shard_tokens - written])
            self._file.write(taken.data)
            self._hash.update(taken.data)
            self._blocks.update(taken.data)
            self.shards[-1] = (name, written + len(taken))
            ids = ids[len(taken) :]

    def close(self) -> str:
        """Close the last file and return the sha256 of all ids."""
        if self._file is not None and not self._file.closed:
            self._file.close()
            self.sums[self.shards[-1][0]] = self._blocks.hexdigest()
            self._blocks = BlockHasher()
        return self._hash.hexdigest()

    def _next_shard(self) -> None:
        self.close()
        self.shards.append((f"{self._name}-{len(self.shards):05d}.bin", 0))
        self._file = open_to_write(self._folder / self.shards[-1][0])


class TokenStream:
    """Shards as one stream of token ids, read on demand.

    `sums` has the checksums of each file's blocks, which are verified when they are first read, and `vocab` is the
    bound of the ids; both are None for files that are still being written.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[tuple[str, int]],
        dtype: np.dtype,
        sums: Mapping[str, str] | None = None,
        vocab: int | None = None,
    ) -> None:
        self._shards: list[CheckedFile | np.ndarray] = [
            np.memmap(folder / name, dtype=dtype, mode="r", shape=(tokens,))
            if sums is None
            else CheckedFile(folder / name, dtype, sums[name], vocab)
            for name, tokens in shards
        ]
        self._starts = np.cumsum([0, *(tokens for _, tokens in shards)])
        self._dtype = dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return an int64 copy of ids [start, start + count), across shard borders."""
        return self.read_raw(start, count).astype(np.int64)

    def read_raw(self, start: int, count: int) -> np.ndarray:
        """Return ids in the dtype of the files; a view of the file if they are all in one shard."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start:,} to {start + count:,} of a stream of {len(self):,}")
        if count == 0:
            return np.empty(0, dtype=self._dtype)
        # side="right": a token at a border belongs to the shard that begins there.
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        while count:
            offset = start - int(self._starts[shard])
            source, stop = self._shards[shard], min(offset + count, int(self._starts[shard + 1] - self._starts[shard]))
            piece = source.read(offset, stop) if isinstance(source, CheckedFile) else source[offset:stop]
            pieces.append(piece)
            start, count, shard = start + len(piece), count - len(piece), shard + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def shards_are_whole(folder: Path, shards: Sequence[tuple[str, int]], dtype: np.dtype) -> bool:
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == tokens * dtype.itemsize
        for name, tokens in shards
    )


ENCODED_AT_ONCE = 1 << 22  # characters: enough work for all cores, few enough for memory


class Written(NamedTuple):
    shards: list[tuple[str, int]]  # file name and tokens of each
    sums: dict[str, str]  # checksums of the blocks of each file
    sha256: str  # of all tokens


class DocumentWriter:
    """Encodes documents and writes the shards of `name`. `seed` shuffles the documents; None keeps their order."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, seed: int | None) -> None:
        self._folder, self._name, self._tokenizer, self._seed = folder, name, tokenizer, seed
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._writer = ShardWriter(folder, name if seed is None else f"unshuffled-{name}", self._dtype)
        # 8 bytes a document; in a list of ints it would be about 40.
        self._starts = array("q")  # position of each document's first token
        self._waiting: list[tuple[bool, str]] = []  # pieces, and whether each begins a document
        self._waiting_characters = 0

    @property
    def documents(self) -> int:
        return len(self._starts)

    def add(self, documents: Iterable[str]) -> None:
        for document in documents:
            for number, piece in enumerate(self._tokenizer.pieces(document)):
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
            # BOS only before the first piece: the later ones continue the document.
            if begins:
                self._starts.append(self._writer.tokens)
                self._writer.append(bos)
            self._writer.append(np.array(ids, dtype=self._dtype))
        self._waiting, self._waiting_characters = [], 0

    def _shuffle(self, seed: int) -> Written:
        """Copy documents from a memory map in source order to the final shards: the corpus may not fit into memory."""
        # Without checksums: the files have just been written, and are removed below.
        source = TokenStream(self._folder, self._writer.shards, self._dtype)
        ends = np.append(np.frombuffer(self._starts, dtype=np.int64)[1:], len(source))
        final = ShardWriter(self._folder, self._name, self._dtype)
        for document in document_order(self.documents, seed, self._name):
            start = self._starts[document]
            final.append(source.read_raw(start, int(ends[document]) - start))
        content = final.close()
        for name, _ in self._writer.shards:
            remove(self._folder / name)
        return Written(final.shards, final.sums, content)
