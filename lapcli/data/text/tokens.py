"""From a recipe's text source to memory-mapped token ids: tokenised once and cached.

cache/tokenizers/KEY/{index.json, tokenizer.json}     by the source's files and the tokenizer's settings
cache/text/KEY/{index.json, *.bin}                    by the source's files, the split and the tokenizer
"""

from dataclasses import dataclass
from pathlib import Path

from lapcli.data.cache import build_once, digest
from lapcli.data.text.corpus import Corpus, corpus_at_hand, hub_list, open_corpus
from lapcli.data.text.tokenizer import SPLIT_PATTERN, Tokenizer, train_tokenizer
from lapcli.data.token_store import DocumentWriter, TokenStream, is_whole, open_stream, read_index, write_index
from lapcli.recipe.data_sources import PREFIX
from lapcli.recipe.schema import TextSource, TokenizerSection
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

VERSION = 3  # of the files under cache/text and cache/tokenizers; changing it rebuilds them
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
    used = tokenizer if isinstance(tokenizer, Tokenizer) else _prepare_tokenizer(corpus, tokenizer)
    folder = _text_folder(corpus.key, used.sha256)
    build_once(folder, lambda unfinished: _tokenise(unfinished, corpus, used), is_whole)
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
    path = Path(section.file).expanduser() if section.file else _tokenizer_folder(corpus.key, section) / TOKENIZER
    return path.is_file() and is_whole(_text_folder(corpus.key, Tokenizer.from_file(path).sha256))


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

    # Each leaves the tokenizer in `ready`, so that it is neither read nor parsed a second time.
    ready: list[Tokenizer] = []

    def train(folder: Path) -> None:
        documents = (text for part in corpus.parts("training the tokenizer", only_train=True) for text in part.train)
        ready.append(train_tokenizer(documents, section.vocab, max_chars=section.train_chars, crop=section.train_crop))
        ready[-1].save(folder / TOKENIZER)
        write_index(folder, {"sha256": ready[-1].sha256})

    def is_intact(folder: Path) -> bool:
        try:
            ready.append(Tokenizer.from_file(folder / TOKENIZER))
            return read_index(folder) == {"sha256": ready[-1].sha256}
        except (DataError, OSError, ValueError):
            return False

    build_once(_tokenizer_folder(corpus.key, section), train, is_intact)
    return ready[-1]


def _tokenizer_folder(corpus_key: str, section: TokenizerSection) -> Path:
    key = digest(VERSION, corpus_key, SPLIT_PATTERN, section.vocab, section.train_chars, section.train_crop)
    return cache_dir() / "tokenizers" / key[:32]


def _text_folder(corpus_key: str, tokenizer_sha256: str) -> Path:
    return cache_dir() / "text" / digest(VERSION, corpus_key, tokenizer_sha256)[:32]


def _tokenise(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    seed = None if corpus.source.shuffled else corpus.source.shuffle_seed
    writers = {part: DocumentWriter(folder, part, tokenizer, seed) for part in _PARTS}
    for parts in corpus.parts("tokenising"):
        writers["train"].add(parts.train)
        writers["validation"].add(parts.validation)
    streams = {part: writer.finish() for part, writer in writers.items()}
    for part, writer in writers.items():
        if not writer.documents:
            raise DataError(
                f"{corpus.source.train} has no text for {part}; check data.train, data.files and data.validation"
            )
    if open_corpus(corpus.source).key != corpus.key:  # edited while it was read: the key is of other content
        raise corpus.changed_meanwhile()
    hashes = {part: [sha256 for _, _, sha256 in shards] for part, (_, shards) in streams.items()}
    index = {
        "identity": digest(hashes, tokenizer.sha256),
        "documents": {part: writer.documents for part, writer in writers.items()},
        "skipped": corpus.skipped,
        "streams": streams,
    }
    write_index(folder, index)


def _open(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> TextData:
    index = read_index(folder)
    train, validation = (open_stream(folder, part) for part in _PARTS)
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
