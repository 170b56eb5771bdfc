"""A data set of conversations as token ids on disk: rendered once and cached.

cache/chat/KEY/{tokens.bin, targets.bin, ends.npy, target_counts.npy, is_cut.npy, index.json}

KEY is a hash of the content, the tokenizer and the longest row. Tokens and targets are verified by block when they are
read, the smaller files completely when they are opened.
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
from lapcli.data.checksums import (
    BlockHasher,
    CheckedFile,
    content_sha256,
    hub_fingerprint,
    read_index,
    refuse_damaged_blobs,
    write_index,
)
from lapcli.data.file_formats import count_rows, read_rows
from lapcli.data.text.shards import token_dtype
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.recipe.chat import GENERATED, DataSet
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import open_to_read, open_to_write, sha256_of_file
from lapcli.runtime.progress import Progress

VERSION = 2  # of the files and of the wording of generated rows
SHOWN = 3  # malformed conversations quoted in a message
_ROWS_AT_ONCE = 2048
_READ_AT_ONCE = 1 << 22
_STREAMS = ("tokens.bin", "targets.bin")
_ARRAYS = ("ends.npy", "target_counts.npy", "is_cut.npy")


class RenderedRows:
    """Rows of token ids, memory-mapped, in the order of the source."""

    def __init__(self, folder: Path, longest: int) -> None:
        index = read_index(folder)
        self.identity: str = index["identity"]
        self.malformed: int = index["malformed"]
        self.examples_of_malformed: list[str] = index["examples"]
        self.longest = longest
        self._ends, self.target_counts, self.is_cut = (np.load(folder / name) for name in _ARRAYS)
        self.lengths = np.diff(self._ends, prepend=0)
        tokens, targets = (folder / name for name in _STREAMS)
        vocab = index["vocab"]
        self._tokens = CheckedFile(tokens, token_dtype(vocab), index["sums"][tokens.name], vocab)
        self._targets = CheckedFile(targets, np.dtype(bool), index["sums"][targets.name])

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a row, and which of them the assistant learns."""
        end = int(self._ends[number])
        start = end - int(self.lengths[number])
        return self._tokens.read(start, end), self._targets.read(start, end)


def prepare_rows(
    data_set: DataSet, tokenizer: Tokenizer, longest: int, progress: Progress | None = None
) -> RenderedRows:
    """Download and render the rows unless they are cached. Safe to call on every rank."""
    content = _content_key(data_set, progress)
    folder = cache_dir() / "chat" / digest(VERSION, data_set.format, content, tokenizer.sha256, longest)[:32]

    def build(unfinished: Path) -> None:
        if data_set.source.startswith("hub:"):
            refuse_damaged_blobs(source_files(data_set) or [], progress)
        _render(unfinished, data_set, tokenizer, longest, progress)
        # The key was computed before the rows were read: an edit in between would be cached under the wrong key.
        if _content_key(data_set, progress) != content:
            raise DataError(
                f"{data_set.name} changed while it was being read; run the command again when it is complete"
            )

    build_once(folder, build, _is_whole)
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
    files = source_files(data_set, progress) or []
    if data_set.source.startswith("hub:"):  # its cache has the hashes, so that gigabytes need not be read
        known = [hub_fingerprint(path) for path in files]
        return [content_sha256([path]) if key is None else key for path, key in zip(files, known, strict=True)]
    return content_sha256(files, progress)


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
    dtype: np.dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    target_counts: list[int] = []
    is_cut: list[bool] = []
    malformed: list[str] = []
    done = 0
    with open_to_write(folder / "tokens.bin") as tokens, open_to_write(folder / "targets.bin") as targets:
        conversations = conversations_of(data_set)
        while rows := list(islice(conversations, _ROWS_AT_ONCE)):
            malformed += [str(row) for row in rows if isinstance(row, Malformed)]
            good = [row for row in rows if not isinstance(row, Malformed)]
            for ids, is_target in render_batch(good, tokenizer):
                tokens.write(ids[:longest].astype(dtype).tobytes())
                targets.write(is_target[:longest].tobytes())
                lengths.append(min(len(ids), longest))
                target_counts.append(int(is_target[:longest].sum()))
                is_cut.append(len(ids) > longest)
            done += len(rows)
            if progress:
                progress(f"rendering {data_set.name}", done, max(total, done))
    if not lengths and not malformed:
        raise DataError(f"{data_set.name} has no rows; check its source")
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    _keep_arrays(folder, ends, np.array(target_counts, dtype=np.int64), np.array(is_cut, dtype=bool))
    index = {
        "vocab": tokenizer.vocab_size,
        "tokens": int(sum(lengths)),
        "malformed": len(malformed),
        "examples": malformed[:SHOWN],
        "identity": _identity(folder),
    }
    write_index(folder, {**index, **_checksums(folder)})


def _keep_arrays(folder: Path, *arrays: np.ndarray) -> None:
    for name, array in zip(_ARRAYS, arrays, strict=True):
        with open_to_write(folder / name) as file:
            np.save(file, array)


def _identity(folder: Path) -> str:
    return digest(*(sha256_of_file(folder / name) for name in (*_STREAMS, "ends.npy")))


def _checksums(folder: Path) -> dict[str, Any]:
    sums = {}
    for name in _STREAMS:
        blocks = BlockHasher()
        with open_to_read(folder / name) as file:
            while content := file.read(_READ_AT_ONCE):
                blocks.update(content)
        sums[name] = blocks.hexdigest()
    return {"sums": sums, "sha256": {name: sha256_of_file(folder / name) for name in _ARRAYS}}


def _is_whole(folder: Path) -> bool:
    """Return whether the index, the sizes and the arrays are intact; tokens are verified when they are read."""
    try:
        index = read_index(folder)
        return _has_sizes(folder, index) and all(
            sha256_of_file(folder / name) == index["sha256"][name] for name in _ARRAYS
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _has_sizes(folder: Path, index: dict[str, Any]) -> bool:
    size = token_dtype(index["vocab"]).itemsize * index["tokens"]
    return [(folder / name).stat().st_size for name in _STREAMS] == [size, index["tokens"]]
