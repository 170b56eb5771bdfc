"""From a recipe's text source to memory-mapped token ids: tokenised once and cached.

cache/tokenizers/KEY/{index.json, tokenizer.json}     by the source's content and the tokenizer's settings
cache/text/KEY/{index.json, *.bin}                    by the source's content, the split and the tokenizer

Both are verified when they are read: the tokenizer completely, token ids by block. Version 0.1 stored no checksums, and
identified local files by size, modification time and both ends; its caches are verified once, by the identity that it
wrote, and adopted.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.cache import build_once, digest
from lapcli.data.checksums import INDEX, BlockHasher, read_index, refuse_damaged_blobs, write_index
from lapcli.data.file_formats import is_text
from lapcli.data.text.corpus import Corpus, corpus_at_hand, hub_list, open_corpus
from lapcli.data.text.shards import DocumentWriter, TokenStream, shards_are_whole, token_dtype
from lapcli.data.text.tokenizer import SPLIT_PATTERN, Tokenizer, train_tokenizer
from lapcli.recipe.data_sources import PREFIX
from lapcli.recipe.schema import TextSource, TokenizerSection
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import move, open_to_read, read_text, remove
from lapcli.runtime.progress import Progress

log = logging.getLogger(__name__)

VERSION = 1  # of the files under cache/text and cache/tokenizers; changing it rebuilds them
TOKENIZER = "tokenizer.json"
_PARTS = ("train", "validation")
_READ_AT_ONCE = 1 << 22


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
        lambda folder: _adopt_text(folder, corpus, used),
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
    # A cache of version 0.1 counts as tokenised: the next run adopts it under the new key.
    for key in (corpus.key_at_hand(), corpus.key_of_0_1()):
        path = Path(section.file).expanduser() if section.file else None
        if path is None and key is not None:
            path = _tokenizer_folder(key, section) / TOKENIZER
        if path is not None and key is not None and path.is_file():
            folder = _text_folder(key, Tokenizer.from_file(path).sha256)
            if _is_whole(folder) or _index_of_0_1(folder):
                return True
    return False


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
        keep(folder, trained)

    def keep(folder: Path, tokenizer: Tokenizer) -> None:
        tokenizer.save(folder / TOKENIZER)
        write_index(folder, {"sha256": tokenizer.sha256})

    def is_whole(folder: Path) -> bool:
        try:
            trained = Tokenizer.from_file(folder / TOKENIZER)
            if read_index(folder) != {"sha256": trained.sha256}:
                return False
        except (DataError, OSError, ValueError):
            return False
        ready.append(trained)
        return True

    def adopt(folder: Path) -> None:
        """Adopt one of version 0.1 if there is text tokenised with it: that folder's name depends on its sha256."""
        key = corpus.key_of_0_1()
        old = _tokenizer_folder(key, section)
        # Version 0.1 wrote no index beside a tokenizer, so a folder with one is not of that version.
        if (old / INDEX).exists() or not (old / TOKENIZER).is_file():
            return
        try:
            trained = Tokenizer.from_file(old / TOKENIZER)
        except DataError:
            return
        if _index_of_0_1(_text_folder(key, trained.sha256)):
            keep(old, trained)
            _rename(old, folder)

    ready: list[Tokenizer] = []
    build_once(_tokenizer_folder(corpus.key, section), train, is_whole, adopt)
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


def _adopt_text(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Adopt token ids of version 0.1 after hashing them, if they match the identity that was written with them."""
    old = _text_folder(corpus.key_of_0_1(), tokenizer.sha256)
    index = _index_of_0_1(old)
    if index is None:
        return
    if not corpus.is_older_than(old / INDEX):
        log.warning("%s is not used: a file of its source has changed since, so that it cannot be verified", old)
        return
    log.warning("%s was made by version 0.1, which kept no checksums; hashing it once", old)
    has_zero_bytes = np.array([0 in tokenizer.decode_bytes([id_]) for id_ in range(tokenizer.vocab_size)])
    dtype, zero_bytes = token_dtype(tokenizer.vocab_size), False
    hashes: dict[str, str] = {}
    sums: dict[str, dict[str, str]] = {part: {} for part in _PARTS}
    for part in _PARTS:
        all_ids = hashlib.sha256()
        for name, _ in index["shards"][part]:
            blocks = BlockHasher()
            with open_to_read(old / name) as file:
                while content := file.read(_READ_AT_ONCE):
                    all_ids.update(content)
                    blocks.update(content)
                    ids = np.frombuffer(content, dtype)
                    # Damaged ids may lie beyond the vocabulary: the identity is compared only after the loop.
                    zero_bytes |= bool(has_zero_bytes[ids[ids < len(has_zero_bytes)]].any())
            sums[part][name] = blocks.hexdigest()
        hashes[part] = all_ids.hexdigest()
    if digest(hashes, tokenizer.sha256) != index["identity"] or index["vocab"] != tokenizer.vocab_size:
        log.warning("%s is damaged (its content does not match its identity); building it again", old)
        remove(old)
        return
    if zero_bytes and any(is_text(file.name) for file in corpus.files):
        return  # version 0.1 accepted text files with zero bytes, such as UTF-16
    write_index(old, {**index, "sums": sums})
    _rename(old, folder)


def _rename(old: Path, folder: Path) -> None:
    if old != folder:
        with contextlib.suppress(OSError):  # without locks another process may have renamed it first
            move(old, folder)


def _index_of_0_1(folder: Path) -> dict[str, Any] | None:
    """Return the index of a folder that version 0.1 completed, if its files have the right sizes."""
    try:
        index = json.loads(read_text(folder / INDEX))
        if set(index) != {"identity", "vocab", "documents", "skipped", "shards"}:
            return None
        dtype = token_dtype(index["vocab"])
        return index if all(shards_are_whole(folder, index["shards"][part], dtype) for part in _PARTS) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
