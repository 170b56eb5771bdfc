"""From a recipe's text source to memory-mapped token ids: tokenised once and cached.

cache/tokenizers/KEY/{index.json, tokenizer.json}     by the source's content and the tokenizer's settings
cache/text/KEY/{index.json, *.bin}                    by the source's content, the split and the tokenizer

Both are verified when they are read: the tokenizer completely, token ids by block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lapcli.data.cache import build_once, digest
from lapcli.data.checksums import read_index, refuse_damaged_blobs, write_index
from lapcli.data.text.corpus import Corpus, corpus_at_hand, hub_list, open_corpus
from lapcli.data.text.shards import DocumentWriter, TokenStream, shards_are_whole, token_dtype
from lapcli.data.text.tokenizer import SPLIT_PATTERN, Tokenizer, train_tokenizer
from lapcli.recipe.data_sources import PREFIX
from lapcli.recipe.schema import TextSource, TokenizerSection
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

VERSION = 2  # of the files under cache/text and cache/tokenizers; changing it rebuilds them
TOKENIZER = "tokenizer.json"
_PARTS = ("train", "validation")


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
    used = tokenizer if isinstance(tokenizer, Tokenizer) else _prepare_tokenizer(corpus, tokenizer, progress)
    folder = build_once(
        _text_folder(corpus.key, used.sha256),
        lambda unfinished: _tokenise(unfinished, corpus, used, progress),
        _is_whole,
    )
    return _open(folder, corpus, used)


def describe_source(source: TextSource, tokenizer: TokenizerSection) -> str:
    """Describe the source of the text and how much of it is prepared; downloads and builds nothing."""
    remote = source.train.startswith("hub:")
    if remote:
        repository, names = hub_list(source)
        where = f"{len(names):,} files of the hub data set {repository}, {names[0]} to {names[-1]}"
    elif source.train == "builtin":
        where = "the built-in text (this Python's documentation and docstrings)"
    elif source.train.startswith(PREFIX):
        where = f"the data source {source.train.removeprefix(PREFIX)}"
    else:
        where = f"local text {source.train}"
    try:
        corpus = corpus_at_hand(source)
        if corpus is None:
            state = (
                "not on this machine: `lap fetch RECIPE` downloads it" if remote else "the first run prepares it, once"
            )
        elif _is_tokenised(corpus, tokenizer):
            state = f"{len(corpus.files):,} files, {corpus.size / 1e6:,.1f} MB, tokenised already"
        else:
            state = f"{len(corpus.files):,} files, {corpus.size / 1e6:,.1f} MB; the first run tokenises them, once"
    except DataError as error:
        state = f"not usable as it is: {error}"
    return f"{where}\n{state}"


def _is_tokenised(corpus: Corpus, section: TokenizerSection) -> bool:
    key = corpus.key_at_hand()
    if key is None:
        return False
    path = Path(section.file).expanduser() if section.file else _tokenizer_folder(key, section) / TOKENIZER
    return path.is_file() and _is_whole(_text_folder(key, Tokenizer.from_file(path).sha256))


def _prepare_tokenizer(corpus: Corpus, section: TokenizerSection, progress: Progress | None) -> Tokenizer:
    """Return the tokenizer that the recipe names, or train one on the training documents."""
    if section.file:
        named = Tokenizer.from_file(Path(section.file).expanduser())
        if named.vocab_size != section.vocab:
            raise DataError(
                f"{section.file} has {named.vocab_size:,} tokens, but tokenizer.vocab says {section.vocab:,}; "
                f"set tokenizer.vocab to {named.vocab_size}"
            )
        return named

    # `train` and `is_whole` leave the tokenizer in `ready`, so that it is neither read nor parsed a second time.
    def train(folder: Path) -> None:
        refuse_damaged_blobs([file.path for file in corpus.files], progress)
        trained = train_tokenizer(
            _train_documents(corpus), section.vocab, max_chars=section.train_chars, crop=section.train_crop
        )
        ready.append(trained)
        trained.save(folder / TOKENIZER)
        write_index(folder, {"sha256": trained.sha256})

    def is_whole(folder: Path) -> bool:
        try:
            trained = Tokenizer.from_file(folder / TOKENIZER)
            if read_index(folder) != {"sha256": trained.sha256}:
                return False
        except (DataError, OSError, ValueError):
            return False
        ready.append(trained)
        return True

    ready: list[Tokenizer] = []
    build_once(_tokenizer_folder(corpus.key, section), train, is_whole)
    return ready[-1]


def _train_documents(corpus: Corpus) -> Iterator[str]:
    for part in corpus.parts("training the tokenizer", only_train=True):
        yield from part.train


def _tokenizer_folder(corpus_key: str, section: TokenizerSection) -> Path:
    key = digest(VERSION, corpus_key, SPLIT_PATTERN, section.vocab, section.train_chars, section.train_crop)
    return cache_dir() / "tokenizers" / key[:32]


def _text_folder(corpus_key: str, tokenizer_sha256: str) -> Path:
    return cache_dir() / "text" / digest(VERSION, corpus_key, tokenizer_sha256)[:32]


def _tokenise(folder: Path, corpus: Corpus, tokenizer: Tokenizer, progress: Progress | None) -> None:
    refuse_damaged_blobs([file.path for file in corpus.files], progress)
    seed = None if corpus.source.shuffled else corpus.source.shuffle_seed
    writers = {part: DocumentWriter(folder, part, tokenizer, seed) for part in _PARTS}
    for parts in corpus.parts("tokenising"):
        writers["train"].add(parts.train)
        writers["validation"].add(parts.validation)
    shards, sums, hashes = {}, {}, {}
    for part, writer in writers.items():
        shards[part], sums[part], hashes[part] = writer.finish()
        if not writer.documents:
            raise DataError(
                f"{corpus.source.train} has no text for {part}; check data.train, data.files and data.validation"
            )
    if open_corpus(corpus.source).key != corpus.key:  # edited while it was read: the key is of other content
        raise corpus.changed_meanwhile()
    index = {
        "identity": digest(hashes, tokenizer.sha256),
        "vocab": tokenizer.vocab_size,
        "documents": {part: writer.documents for part, writer in writers.items()},
        "skipped": corpus.skipped,
        "shards": shards,
        "sums": sums,
    }
    write_index(folder, index)


def _is_whole(folder: Path) -> bool:
    """Return whether the index and the sizes are intact; the content of shards is verified when it is read."""
    try:
        index = read_index(folder)
        dtype = token_dtype(index["vocab"])
        return all(shards_are_whole(folder, shards, dtype) for shards in index["shards"].values())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> TextData:
    index = read_index(folder)
    dtype: np.dtype = token_dtype(index["vocab"])
    train, validation = (
        TokenStream(folder, index["shards"][part], dtype, index["sums"][part], tokenizer.vocab_size) for part in _PARTS
    )
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
