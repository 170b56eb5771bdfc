"""From a text source to memory-mapped token ids, tokenised once and cached, and to batches.

The files of a source (the built-in text, a hub data set or local ones) are read as one sequence of documents, some of
them held out for validation, selected by the seed.

cache/tokenizers/KEY/{index.json, tokenizer.json}     by the source's files, the split and the tokenizer's settings
cache/text/KEY/{index.json, *.bin}                    by the files of a part, how they are read, and the tokenizer

A batch is a function of (seed, step): sequences of a stream of documents in an order that is computed, not stored.
Sequence n of a run is sequence n % sequences_per_epoch of epoch n // sequences_per_epoch. Sequence i of the stream
covers tokens [i T, i T + T]: the last target of one is the first input of the next, and every token except the
stream's first (and a few after the last complete sequence) is a target once per epoch. The assignment to ranks has no
effect on the result.

Shapes: B sequences, T tokens of context.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapcli.data.files import build_once, digest, is_text, read_documents
from lapcli.data.sources import source_files
from lapcli.data.text.tokenizer import SPLIT_PATTERN, Tokenizer, train_tokenizer
from lapcli.data.token_store import PartWriter, TokenStore, TokenStream, file_key, has_index
from lapcli.recipe.schema import UNKNOWN, TextSource, TokenizerSection
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

VERSION = 7  # of the files under cache/text and cache/tokenizers; changing it rebuilds them
TOKENIZER = "tokenizer.json"
DEFAULT_FRACTION = 1 / 20
PART_BYTES = 1 << 26  # consecutive files are tokenised into one part as long as they have fewer bytes together


@dataclass(frozen=True)
class TextData:
    """The tokenizer, and the training and validation tokens of a language model."""

    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream
    identity: str  # sha256 of all tokens, their order and the tokenizer, the same on every machine
    description: str
    facts: dict[str, Any]  # for `lap fetch`


class Corpus:
    """A source's documents in source order, cropped, without null and empty documents."""

    def __init__(self, source: TextSource, files: Sequence[Path], progress: Progress | None = None) -> None:
        self.source, self.files, self._progress = source, files, progress
        self._holds_out_a_file = source.validation is None and len(files) > 1
        self._fraction = source.validation or DEFAULT_FRACTION
        # A shuffled source keeps its order, also for the held-out documents.
        self.seed = None if source.shuffled else 0
        self._keys = [file_key(path) for path in files]
        self._sizes = [int(size) for _, size, _ in self._keys]
        self.size = sum(self._sizes)
        # For the part last read: the number of nulls and empty documents, and whether its only document was split.
        self.skipped, self.is_split = 0, False
        self.parts: list[range] = []  # the files of each part of the token store
        room = -1
        for number, size in enumerate(self._sizes):
            if size > room or (self._holds_out_a_file and number == len(files) - 1):
                self.parts.append(range(number, number))
                room = PART_BYTES
            self.parts[-1] = range(self.parts[-1].start, number + 1)
            room -= size

    def part_folders(self, tokenizer: Tokenizer) -> list[Path]:
        split = self._fraction if len(self.files) == 1 else None  # see `documents`
        settings = [self.source.column, self.source.crop, split, tokenizer.sha256]
        keys = [[self._keys[number] for number in part] for part in self.parts]
        return [cache_dir() / "text" / digest(VERSION, key, settings)[:32] for key in keys]

    def tokenizer_folder(self, section: TokenizerSection) -> Path:
        split = self.source.model_dump(include={"column", "crop", "shuffled", "validation"})
        settings = [SPLIT_PATTERN, section.vocab, section.train_chars, section.train_crop]
        return cache_dir() / "tokenizers" / digest(VERSION, self._keys, split, settings)[:32]

    def documents(self, part: range, doing: str) -> Iterator[str]:
        """Yield the documents of a part; the only document of a single file is split in two, to hold out the second."""
        documents = self._read(part, doing)
        first = list(islice(documents, 2)) if len(self.files) == 1 else []
        self.is_split = len(first) == 1
        yield from chain(split_document(first[0], self._fraction) if self.is_split else first, documents)

    def training_documents(self) -> Iterator[str]:
        """Yield the documents that are not held out; finding them needs a pass over the source."""
        doing = "training the tokenizer"
        if self._holds_out_a_file:
            for part in self.parts[:-1]:
                yield from self.documents(part, doing)
            return
        counts = [sum(1 for _ in self.documents(part, "counting documents")) for part in self.parts]
        every = chain.from_iterable(self.documents(part, doing) for part in self.parts)
        yield from compress(every, ~self.held_out(counts, self.is_split))

    def held_out(self, counts: Sequence[int], is_split: bool) -> np.ndarray:
        """Return a mask of the validation documents, for the number of documents in each part."""
        if self._holds_out_a_file:
            mask = np.repeat(np.arange(len(counts)) == len(counts) - 1, counts)
        else:
            mask = np.array([False, True]) if is_split else held_out(sum(counts), self._fraction, self.seed)
        if mask.all() or not mask.any():
            raise DataError(
                f"{self.source.train} has no text for {'train' if mask.any() else 'validation'}; check data.train, "
                "data.files and data.validation"
            )
        return mask

    def _read(self, part: range, doing: str) -> Iterator[str]:
        before, self.skipped = sum(self._sizes[: part.start]), 0
        for number in part:
            for fraction, documents in read_documents(self.files[number], self.source.column):
                if self._progress:
                    self._progress(doing, before + int(fraction * self._sizes[number]), self.size)
                self.skipped += sum(not document for document in documents)
                yield from (document[: self.source.crop] for document in documents if document)
            before += self._sizes[number]


def held_out(count: int, fraction: float, seed: int | None) -> np.ndarray:
    """Return a mask of the validation documents, at least one, never all.

    They are the last in shuffled order, or without a seed in the source's own order, which is random already.
    """
    held = min(max(math.ceil(count * fraction), 1), count - 1)
    order = np.arange(count) if seed is None else document_order(count, seed, "validation")
    mask = np.zeros(count, dtype=bool)
    mask[order[count - held :]] = True  # not [-held:]: with nothing to hold out that would be all
    return mask


def document_order(count: int, seed: int, purpose: str) -> np.ndarray:
    """Return a permutation of `count` documents, a different one for each purpose."""
    return np.random.default_rng([seed, *purpose.encode()]).permutation(count)


def split_document(document: str, fraction: float) -> tuple[str, str]:
    """Split a document into a part to train on and a last part to validate on, after a newline if one is near."""
    target = max(round(len(document) * (1 - fraction)), 1)
    cut = document.rfind("\n", target * 9 // 10, target) + 1 or target
    return document[:cut], document[cut:]


def open_corpus(source: TextSource, progress: Progress | None = None, *, download: bool = True) -> Corpus | None:
    """Open the source's files; without `download`, None if they would have to be downloaded or extracted."""
    if source.train == UNKNOWN:
        raise DataError("the run was imported, and its training text is unknown; name a text with --data")
    paths = source_files(source.train, source.files, source.revision, "text", download=download)
    if paths is None:
        return None
    if source.column != "text" and all(is_text(path.name) for path in paths):
        raise DataError(f"data.column: text files have no columns such as {source.column}; remove it")
    return Corpus(source, paths, progress)


def tokenise(
    source: TextSource,
    tokenizer: TokenizerSection | Tokenizer,
    share: slice = slice(None),
    progress: Progress | None = None,
) -> tuple[Corpus, Tokenizer, list[Path]]:
    """Download, train the tokenizer unless it is given, and tokenise some of the parts into their folders."""
    corpus = open_corpus(source, progress)
    assert corpus is not None
    used = tokenizer if isinstance(tokenizer, Tokenizer) else _prepare_tokenizer(corpus, tokenizer)
    folders = corpus.part_folders(used)
    for part, folder in list(zip(corpus.parts, folders, strict=True))[share]:
        build_once(folder, partial(_tokenise, corpus, part, used), has_index)
    return corpus, used, folders


def prepare_text(
    source: TextSource, tokenizer: TokenizerSection | Tokenizer, *, progress: Progress | None = None
) -> TextData:
    """Prepare the training and validation tokens; cached results are reused. Safe to call on every rank."""
    corpus, used, folders = tokenise(source, tokenizer, progress=progress)
    store = TokenStore(folders)
    is_held_out = corpus.held_out(store.counts, store.indexes[0]["is_split"])
    streams = []
    for is_wanted, name in ((~is_held_out, "train"), (is_held_out, "validation")):
        documents = np.flatnonzero(is_wanted)
        order = np.arange(len(documents)) if corpus.seed is None else document_order(len(documents), corpus.seed, name)
        streams.append(TokenStream(store, documents[order]))
    train, validation = streams
    held, skipped = int(is_held_out.sum()), sum(index["skipped"] for index in store.indexes)
    return TextData(
        tokenizer=used,
        train=train,
        validation=validation,
        identity=digest(store.identity, hashlib.sha256(is_held_out.data).hexdigest(), corpus.seed, used.sha256),
        description=(
            f"{source.train}: {len(store) - held:,} documents of {len(train):,} tokens to train on, "
            f"{held:,} of {len(validation):,} held out" + (f", {skipped:,} empty ones left out" if skipped else "")
        ),
        facts={
            "source_files": len(corpus.files),
            "source_bytes": corpus.size,
            "documents": len(store),
            "train_tokens": len(train),
            "validation_tokens": len(validation),
            "bytes_on_disk": sum(path.stat().st_size for folder in folders for path in folder.iterdir()),
            "folder": str(folders[0].parent),
        },
    )


def _prepare_tokenizer(corpus: Corpus, section: TokenizerSection) -> Tokenizer:
    """Return the tokenizer that the recipe names, or train one on the training documents."""
    if section.file:
        named = Tokenizer.from_file(Path(section.file).expanduser())
        if named.vocab_size != section.vocab:
            raise DataError(
                f"{section.file} has {named.vocab_size:,} tokens, but tokenizer.vocab says {section.vocab:,}; "
                f"set tokenizer.vocab to {named.vocab_size}"
            )
        return named

    def train(folder: Path) -> None:
        documents = corpus.training_documents()
        train_tokenizer(documents, section.vocab, max_chars=section.train_chars, crop=section.train_crop).save(
            folder / TOKENIZER
        )

    return Tokenizer.from_file(build_once(corpus.tokenizer_folder(section), train) / TOKENIZER)


def _tokenise(corpus: Corpus, part: range, tokenizer: Tokenizer, folder: Path) -> None:
    writer, has_begun = PartWriter(folder, tokenizer.vocab_size), False
    for begins, ids in tokenizer.encode_stream(corpus.documents(part, "tokenising")):
        if begins and has_begun:
            writer.end()
        # BOS only before the first piece: later pieces continue the document.
        writer.append([tokenizer.bos, *ids] if begins else ids)
        has_begun = True
    if has_begun:
        writer.end()
    writer.close(skipped=corpus.skipped, is_split=corpus.is_split)


def describe_source(source: TextSource) -> str:
    """Describe the text source without downloading or building anything."""
    try:
        corpus = open_corpus(source, download=False)
    except DataError as error:
        return f"{source.train}\nnot usable as it is: {error}"
    if corpus is None:
        return f"{source.train}\nnot on this machine: `lap fetch RECIPE` downloads it"
    return (
        f"{source.train}\n{len(corpus.files):,} files, {corpus.size / 1e6:,.1f} MB; the first run tokenises them, once"
    )


class TokenBatches:
    """Batches of a stream; `shuffled`: the stream is already in random order; otherwise each epoch is shuffled."""

    def __init__(self, stream: TokenStream, *, context: int, batch: int, seed: int, shuffled: bool) -> None:
        self.sequences_per_epoch = max(len(stream) - 1, 0) // context
        if self.sequences_per_epoch == 0:
            raise DataError(
                f"the text has {len(stream):,} tokens, fewer than one sequence of {context:,} and its targets; "
                "give more text or a smaller model.context"
            )
        self._stream, self._context, self._batch, self._seed, self._shuffled = stream, context, batch, seed, shuffled
        # Two epochs, because a batch may span the boundary between them. Caching a bound method would be a reference
        # cycle: the files would stay open until a garbage collection.
        count = self.sequences_per_epoch
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(count))

    def sequences(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 inputs_BT and targets_BT of positions [first, first + count) of the global batch of `step`."""
        tokens = np.empty((count, self._context + 1), dtype=np.int64)
        for row in range(count):
            epoch, index = divmod(step * self._batch + first + row, self.sequences_per_epoch)
            # A shuffled source is read in the same order in every epoch, as in nanochat's loader.
            index = index if self._shuffled else int(self._order(epoch)[index])
            tokens[row] = self._stream.read(index * self._context, self._context + 1)
        tokens_BT = torch.from_numpy(tokens)
        return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def identity(self, step: int) -> str:
        """Return the name of a batch, for messages."""
        first, last = step * self._batch, (step + 1) * self._batch - 1
        names = [f"{n % self.sequences_per_epoch:,} of epoch {n // self.sequences_per_epoch}" for n in (first, last)]
        return f"sequences {names[0]} to {names[1]} ({self.sequences_per_epoch:,} an epoch, seed {self._seed})"
