"""A data set of conversations as token ids on disk: rendered once and cached.

cache/chat/KEY/{index.json, tokens-00000.bin, targets-00000.bin, rows-00000.bin}

KEY is a hash of the source's files, the tokenizer and the longest row. `rows` has three numbers for each row: its end
among the tokens, its number of targets, and whether it was cut at the longest row.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.cache import build_once, digest
from lapcli.data.chat.conversation import Malformed, Turn, refuse_empty_turns, render_batch
from lapcli.data.chat.formats import READERS, source_files
from lapcli.data.chat.generated import GENERATED_FORMATS, builtin_questions, generated_conversations, generated_key
from lapcli.data.file_formats import count_rows, read_rows
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.data.token_store import ShardWriter, file_key, is_whole, open_stream, read_index, token_dtype, write_index
from lapcli.recipe.chat import GENERATED, DataSet
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

VERSION = 3  # of the files and of the wording of generated rows
SHOWN = 3  # malformed conversations quoted in a message
_ROWS_AT_ONCE = 2048


class RenderedRows:
    """Rows of token ids, memory-mapped, in the order of the source."""

    def __init__(self, folder: Path, longest: int) -> None:
        index = read_index(folder)
        self.identity: str = index["identity"]
        self.malformed: int = index["malformed"]
        self.examples_of_malformed: list[str] = index["examples"]
        self.longest = longest
        self._tokens, self._targets, rows = (open_stream(folder, name) for name in ("tokens", "targets", "rows"))
        self._ends, self.target_counts, is_cut = rows.read(0, len(rows)).reshape(-1, 3).T
        self.lengths, self.is_cut = np.diff(self._ends, prepend=0), is_cut.astype(bool)

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a row, and which of them the assistant learns."""
        length = int(self.lengths[number])
        start = int(self._ends[number]) - length
        return self._tokens.read_raw(start, length), self._targets.read_raw(start, length)


def prepare_rows(
    data_set: DataSet, tokenizer: Tokenizer, longest: int, progress: Progress | None = None
) -> RenderedRows:
    """Download and render the rows unless they are cached. Safe to call on every rank."""
    content = _content_key(data_set, progress)
    folder = cache_dir() / "chat" / digest(VERSION, data_set.format, content, tokenizer.sha256, longest)[:32]

    def build(unfinished: Path) -> None:
        _render(unfinished, data_set, tokenizer, longest, progress)
        # The key was computed before the rows were read: an edit in between would be cached under the wrong key.
        if _content_key(data_set, progress) != content:
            raise DataError(
                f"{data_set.name} changed while it was being read; run the command again when it is complete"
            )

    build_once(folder, build, is_whole)
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
    return [file_key(path.name, path) for path in source_files(data_set, progress) or []]


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
    tokens = ShardWriter(folder, "tokens", token_dtype(tokenizer.vocab_size))
    targets, rows = ShardWriter(folder, "targets", np.dtype(bool)), ShardWriter(folder, "rows", np.dtype("<i8"))
    malformed: list[str] = []
    done = 0
    conversations = conversations_of(data_set)
    while some := list(islice(conversations, _ROWS_AT_ONCE)):
        malformed += [str(row) for row in some if isinstance(row, Malformed)]
        good = [row for row in some if not isinstance(row, Malformed)]
        for ids, is_target in render_batch(good, tokenizer):
            tokens.append(ids[:longest])
            targets.append(is_target[:longest])
            rows.append(np.array([tokens.count, is_target[:longest].sum(), len(ids) > longest]))
        done += len(some)
        if progress:
            progress(f"rendering {data_set.name}", done, max(total, done))
    if not done:
        raise DataError(f"{data_set.name} has no rows; check its source")
    streams = {"tokens": tokens.close(), "targets": targets.close(), "rows": rows.close()}
    identity = digest([sha256 for _, shards in streams.values() for _, _, sha256 in shards])
    write_index(
        folder,
        {"identity": identity, "malformed": len(malformed), "examples": malformed[:SHOWN], "streams": streams},
    )
