"""From a recipe's text source to memory-mapped token ids: tokenised once and cached.

cache/tokenizers/KEY/{index.json, tokenizer.json}     by the source's files and the tokenizer's settings
cache/text/KEY/{index.json, *.bin}                    by the source's files, the split and the tokenizer
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lapcli.data.cache import build_once, digest
from lapcli.data.text.corpus import Corpus, document_order, hub_list, open_corpus
from lapcli.data.text.tokenizer import SPLIT_PATTERN, Tokenizer, train_tokenizer
from lapcli.data.token_store import (
    DocumentStream,
    StoreWriter,
    TokenStore,
    TokenStream,
    has_index,
    read_index,
    write_index,
)
from lapcli.recipe.schema import TextSource, TokenizerSection
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

VERSION = 4  # of the files under cache/text and cache/tokenizers; changing it rebuilds them
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TextData:
    """The tokenizer and the tokens that a language model is trained and validated on."""

    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream
    identity: str  # sha256 of both streams and the tokenizer, the same on every machine
    documents: int
    description: str
    folder: Path  # of the shards
    source_files: int
    source_bytes: int


def prepare_text(
    source: TextSource, tokenizer: TokenizerSection | Tokenizer, *, progress: Progress | None = None
) -> TextData:
    """Download, train the tokenizer unless it is given, and tokenise; results in the cache are reused.

    Safe to call on every rank.
    """
    corpus = open_corpus(source, progress)
    assert corpus is not None
    used = tokenizer if isinstance(tokenizer, Tokenizer) else _prepare_tokenizer(corpus, tokenizer)
    folder = _text_folder(corpus.key, used.sha256)
    build_once(folder, lambda unfinished: _tokenise(unfinished, corpus, used), has_index)
    return _open(folder, corpus, used)


def describe_source(source: TextSource, tokenizer: TokenizerSection) -> str:
    """Describe the source of the text and how much of it is prepared; downloads and builds nothing."""
    if source.train.startswith("hub:"):
        repository, names = hub_list(source)
        where = f"{len(names):,} files of the hub data set {repository}, {names[0]} to {names[-1]}"
        missing = "not on this machine: `lap fetch RECIPE` downloads it"
    else:
        builtin = "the built-in text (this Python's documentation and docstrings)"
        where = builtin if source.train == "builtin" else source.train
        missing = "the first run prepares it, once"
    try:
        corpus = open_corpus(source, download=False)
    except DataError as error:
        return f"{where}\nnot usable as it is: {error}"
    if corpus is None:
        return f"{where}\n{missing}"
    folder = _tokenizer_folder(corpus.key, tokenizer)
    path = Path(tokenizer.file).expanduser() if tokenizer.file else folder / TOKENIZER
    is_tokenised = path.is_file() and has_index(_text_folder(corpus.key, Tokenizer.from_file(path).sha256))
    state = "tokenised already" if is_tokenised else "the first run tokenises them, once"
    return f"{where}\n{len(corpus.files):,} files, {corpus.size / 1e6:,.1f} MB, {state}"


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
        documents = (text for is_held_out, text in corpus.documents("training the tokenizer") if not is_held_out)
        trained = train_tokenizer(documents, section.vocab, max_chars=section.train_chars, crop=section.train_crop)
        trained.save(folder / TOKENIZER)
        write_index(folder, {"sha256": trained.sha256})

    def is_intact(folder: Path) -> bool:
        try:
            return read_index(folder) == {"sha256": Tokenizer.from_file(folder / TOKENIZER).sha256}
        except (DataError, OSError, ValueError):
            return False

    return Tokenizer.from_file(build_once(_tokenizer_folder(corpus.key, section), train, is_intact) / TOKENIZER)


def _tokenizer_folder(corpus_key: str, section: TokenizerSection) -> Path:
    key = digest(VERSION, corpus_key, SPLIT_PATTERN, section.vocab, section.train_chars, section.train_crop)
    return cache_dir() / "tokenizers" / key[:32]


def _text_folder(corpus_key: str, tokenizer_sha256: str) -> Path:
    return cache_dir() / "text" / digest(VERSION, corpus_key, tokenizer_sha256)[:32]


def _tokenise(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    writer, is_held_out = StoreWriter(folder, tokenizer.vocab_size, columns=2), bytearray()  # a byte for each document

    def texts() -> Iterator[str]:
        for held_out, document in corpus.documents("tokenising"):
            is_held_out.append(held_out)
            yield document

    for begins, ids in tokenizer.encode_stream(texts()):
        if begins and writer.tokens:
            writer.end(is_held_out[writer.documents])
        # BOS only before the first piece: the later ones continue the document.
        writer.append([tokenizer.bos, *ids] if begins else ids)
    if len(set(is_held_out)) < 2:
        part = "validation" if 0 in is_held_out else "train"
        raise DataError(
            f"{corpus.source.train} has no text for {part}; check data.train, data.files and data.validation"
        )
    writer.end(is_held_out[-1])
    writer.close(tokenizer.sha256, corpus.seed, skipped=corpus.skipped)


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> TextData:
    store = TokenStore(folder)
    _, is_held_out = store.numbers.T
    streams = {}
    for number, name in enumerate(("train", "validation")):
        documents = np.flatnonzero(is_held_out == number)
        order = np.arange(len(documents)) if corpus.seed is None else document_order(len(documents), corpus.seed, name)
        streams[name] = DocumentStream(store, documents[order])
    train, validation, held = streams["train"], streams["validation"], int(is_held_out.sum())
    skipped = store.index["skipped"]
    return TextData(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        identity=store.identity,
        documents=len(store),
        description=(
            f"{corpus.source.train}: {len(store) - held:,} documents of {len(train):,} tokens to train on, "
            f"{held:,} of {len(validation):,} held out" + (f", {skipped:,} empty ones left out" if skipped else "")
        ),
        folder=folder,
        source_files=len(corpus.files),
        source_bytes=corpus.size,
    )
