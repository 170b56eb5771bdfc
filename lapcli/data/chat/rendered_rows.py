"""A data set of conversations as token ids on disk: rendered once and cached.

cache/chat/KEY is a token store, KEY a hash of the source's files, the tokenizer and the longest row. The numbers of a
row are its end among the tokens, its number of targets, and whether it was cut at the longest row.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lapcli.data.cache import build_once, digest
from lapcli.data.chat.conversation import Malformed, Turn, refuse_empty_turns, render_batch
from lapcli.data.chat.formats import READERS, source_files
from lapcli.data.chat.generated import GENERATED_FORMATS, builtin_questions, generated_conversations, generated_key
from lapcli.data.file_formats import count_rows, read_rows
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.data.token_store import StoreWriter, TokenStore, file_key, has_index
from lapcli.recipe.chat import GENERATED, DataSet
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

VERSION = 4  # of the files and of the wording of generated rows
SHOWN = 3  # malformed conversations quoted in a message
_ROWS_AT_ONCE = 2048


class RenderedRows(TokenStore):
    def __init__(self, folder: Path, longest: int) -> None:
        super().__init__(folder)
        self.longest = longest
        self.malformed: int = self.index["malformed"]
        self.examples_of_malformed: list[str] = self.index["examples"]
        self.target_counts, self.is_cut = self.numbers[:, 1], self.numbers[:, 2].astype(bool)


def prepare_rows(
    data_set: DataSet, tokenizer: Tokenizer, longest: int, progress: Progress | None = None
) -> RenderedRows:
    """Download and render the rows unless they are cached. Safe to call on every rank."""
    content = _content_key(data_set, progress)
    folder = cache_dir() / "chat" / digest(VERSION, data_set.format, content, tokenizer.sha256, longest)[:32]
    build_once(folder, lambda new: _render(new, data_set, tokenizer, longest, progress), has_index)
    return RenderedRows(folder, longest)


def rows_at_hand(data_set: DataSet) -> int | None:
    """Count the rows of the source; None if that needs a download. The recipe sets the number of generated rows."""
    if data_set.format in GENERATED:
        return data_set.rows
    if data_set.format == "questions":
        return sum(1 for _ in builtin_questions())
    files = source_files(data_set, download=False)
    return None if files is None else sum(count_rows(path) for path in files)


def _content_key(data_set: DataSet, progress: Progress | None) -> list[Any]:
    """Return everything that the rows depend on, for the cache key."""
    if data_set.format in GENERATED_FORMATS:
        return generated_key(data_set)
    return [file_key(path) for path in source_files(data_set, progress) or []]


def conversations_of(data_set: DataSet) -> Iterator[list[Turn] | Malformed]:
    """Yield every row of the source as a conversation, or the error in it."""
    if data_set.format in GENERATED_FORMATS:
        yield from generated_conversations(data_set)
        return
    read = READERS[data_set.format]
    for path in source_files(data_set) or []:
        for number, row in enumerate(read_rows(path), start=1):
            try:
                turns = read(row)
                refuse_empty_turns(turns)
                yield turns
            except Malformed as error:
                yield Malformed(f"{path.name} row {number}: {error}")


def _render(folder: Path, data_set: DataSet, tokenizer: Tokenizer, longest: int, progress: Progress | None) -> None:
    total = rows_at_hand(data_set) or 0
    writer = StoreWriter(folder, tokenizer.vocab_size, columns=3, has_targets=True)
    malformed: list[str] = []
    conversations = conversations_of(data_set)
    while some := list(islice(conversations, _ROWS_AT_ONCE)):
        malformed += [str(row) for row in some if isinstance(row, Malformed)]
        for ids, is_target in render_batch([row for row in some if not isinstance(row, Malformed)], tokenizer):
            writer.append(ids[:longest], is_target[:longest])
            writer.end(is_target[:longest].sum(), len(ids) > longest)
        if progress:
            done = writer.documents + len(malformed)
            progress(f"rendering {data_set.name}", done, max(total, done))
    if not writer.documents and not malformed:
        raise DataError(f"{data_set.name} has no rows; check its source")
    writer.close(malformed=len(malformed), examples=malformed[:SHOWN])
