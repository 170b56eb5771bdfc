"""From a recipe's text source to memory-mapped token ids: done once, kept in the cache, opened at once ever after.

cache/tokenizers/KEY/tokenizer.json     by the source's content and the tokenizer's settings
cache/text/KEY/{index.json, *.bin}      by the source's content, the split and the tokenizer
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lapcli.data.cache import build_once, digest
from lapcli.data.text.corpus import Corpus, Progress
from lapcli.data.text.documents import DocumentWriter
from lapcli.data.text.shards import TokenStream, shards_are_whole, token_dtype
from lapcli.data.text.sources import corpus_at_hand, hub_list, open_corpus
from lapcli.data.text.tokenizer import SPLIT_PATTERN, Tokenizer, train_tokenizer
from lapcli.recipe.schema import TextSource, TokenizerSection
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError

VERSION = 1  # of the files under cache/text and cache/tokenizers; a change of it builds them again
INDEX = "index.json"


@dataclass(frozen=True)
class TextData:
    """What a language model trains on and is validated on."""

    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream
    identity: str  # sha256 of both streams and the tokenizer: the same wherever the same text was prepared
    documents: int
    description: str
    folder: Path  # of the shards
    source_files: int
    source_bytes: int


def prepare_text(source: TextSource, tokenizer: TokenizerSection, *, progress: Progress | None = None) -> TextData:
    """Download, train the tokenizer, tokenise: whatever of it has not been done before. Safe to call on every rank."""
    corpus = open_corpus(source, progress)
    used = _prepare_tokenizer(corpus, tokenizer)
    folder = build_once(
        _text_folder(corpus, used.sha256), lambda unfinished: _tokenise(unfinished, corpus, used), _is_whole
    )
    return _open(folder, corpus, used)


def describe_source(source: TextSource, tokenizer: TokenizerSection) -> str:
    """Where the text would come from and how much of the work is done; downloads and builds nothing."""
    remote = source.train.startswith("hub:")
    if remote:
        repository, names = hub_list(source)
        where = f"{len(names):,} files of the hub data set {repository}, {names[0]} to {names[-1]}"
    elif source.train == "builtin":
        where = "the built-in text (this Python's documentation and docstrings)"
    else:
        where = f"local text {source.train}"
    try:
        corpus = corpus_at_hand(source)
        if corpus is None:
            state = (
                "not on this machine yet: `lap fetch RECIPE` gets it" if remote else "the first run prepares it, once"
            )
        elif (ready := _prepared_tokenizer(corpus, tokenizer)) and _is_whole(_text_folder(corpus, ready.sha256)):
            state = f"{len(corpus.files):,} files, {corpus.size / 1e6:,.1f} MB, tokenised already"
        else:
            state = f"{len(corpus.files):,} files, {corpus.size / 1e6:,.1f} MB; the first run tokenises them, once"
    except DataError as error:
        state = f"not usable as it is: {error}"
    return f"{where}\n{state}"


def _prepared_tokenizer(corpus: Corpus, section: TokenizerSection) -> Tokenizer | None:
    path = Path(section.file).expanduser() if section.file else _tokenizer_folder(corpus, section) / "tokenizer.json"
    return Tokenizer.from_file(path) if path.is_file() else None


def _prepare_tokenizer(corpus: Corpus, section: TokenizerSection) -> Tokenizer:
    """The one that the recipe names, or one trained on the documents to train on."""
    if section.file:
        given = Tokenizer.from_file(Path(section.file).expanduser())
        if given.vocab_size != section.vocab:
            raise DataError(
                f"{section.file} has {given.vocab_size:,} tokens and tokenizer.vocab says {section.vocab:,}; "
                f"set tokenizer.vocab to {given.vocab_size}"
            )
        return given

    def train(folder: Path) -> None:
        trained = train_tokenizer(
            _train_documents(corpus), section.vocab, max_chars=section.train_chars, crop=section.train_crop
        )
        trained.save(folder / "tokenizer.json")
        ready.append(trained)

    def is_whole(folder: Path) -> bool:
        try:
            ready.append(Tokenizer.from_file(folder / "tokenizer.json"))
        except DataError:
            return False
        return True

    ready: list[Tokenizer] = []
    build_once(_tokenizer_folder(corpus, section), train, is_whole)
    return ready[-1]


def _train_documents(corpus: Corpus) -> Iterator[str]:
    for part in corpus.parts("training the tokenizer", only_train=True):
        yield from part.train


def _tokenizer_folder(corpus: Corpus, section: TokenizerSection) -> Path:
    key = digest(VERSION, corpus.key, SPLIT_PATTERN, section.vocab, section.train_chars, section.train_crop)
    return cache_dir() / "tokenizers" / key[:32]


def _text_folder(corpus: Corpus, tokenizer_sha256: str) -> Path:
    return cache_dir() / "text" / digest(VERSION, corpus.key, tokenizer_sha256)[:32]


def _tokenise(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    seed = None if corpus.source.shuffled else corpus.source.shuffle_seed
    writers = {part: DocumentWriter(folder, part, tokenizer, seed) for part in ("train", "validation")}
    for parts in corpus.parts("tokenising"):
        writers["train"].add(parts.train)
        writers["validation"].add(parts.validation)
    shards, hashes = {}, {}
    for part, writer in writers.items():
        shards[part], hashes[part] = writer.finish()
        if not writer.documents:
            raise DataError(
                f"{corpus.source.train} has no text for {part}; check data.train, data.files and data.validation"
            )
    if open_corpus(corpus.source).key != corpus.key:  # edited while it was read: the key would name other content
        raise corpus.changed_meanwhile()
    index = {
        "identity": digest(hashes, tokenizer.sha256),
        "vocab": tokenizer.vocab_size,
        "documents": {part: writer.documents for part, writer in writers.items()},
        "skipped": corpus.skipped,
        "shards": shards,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        dtype = token_dtype(index["vocab"])
        return all(shards_are_whole(folder, shards, dtype) for shards in index["shards"].values())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> TextData:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    dtype: np.dtype = token_dtype(index["vocab"])
    train, validation = (TokenStream(folder, index["shards"][part], dtype) for part in ("train", "validation"))
    documents = index["documents"]
    return TextData(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        identity=index["identity"],
        documents=sum(documents.values()),
        description=(
            f"{corpus.source.train}: {documents['train']:,} documents of {len(train):,} tokens to train on, "
            f"{documents['validation']:,} of {len(validation):,} held out"
            + (f", {index['skipped']:,} empty ones left out" if index["skipped"] else "")
        ),
        folder=folder,
        source_files=len(corpus.files),
        source_bytes=corpus.size,
    )
