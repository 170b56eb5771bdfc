"""A data set of conversations as token ids on disk: rendered once, kept in the cache, opened at once ever after.

cache/chat/KEY/{tokens.bin, targets.bin, ends.npy, target_counts.npy, index.json}

KEY is of the content, the tokenizer and the longest row.
"""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.cache import build_once, digest
from lapcli.data.chat import tasks
from lapcli.data.chat.conversation import Malformed, Turn
from lapcli.data.chat.questions import builtin_questions
from lapcli.data.chat.rendering import render_batch
from lapcli.data.chat.sources import count_rows, read_rows, source_files
from lapcli.data.chat.spelling import QUESTIONS, shuffled_words, simple_spelling, spelling_bee
from lapcli.data.chat.words import SYSTEM, builtin_words, read_words, system_words
from lapcli.data.fingerprint import hub_fingerprint
from lapcli.data.text.builtin import builtin_sha256, builtin_text
from lapcli.data.text.corpus import Progress
from lapcli.data.text.shards import token_dtype
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.recipe.chat import GENERATED, DataSet
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file

VERSION = 1  # of the files and of the wording of generated rows
SHOWN = 3  # malformed conversations that a message quotes
_ROWS_AT_ONCE = 2048
_ARRAYS = ("ends.npy", "target_counts.npy")

Reader = Callable[[Any], list[Turn]]
READERS: dict[str, Reader] = {
    "conversations": tasks.messages,
    "multiple_choice": tasks.multiple_choice,
    "gsm8k": tasks.gsm8k,
}


class RenderedRows:
    """Rows of token ids, memory-mapped, in the order of the source."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.identity: str = index["identity"]
        self.malformed: int = index["malformed"]
        self.examples_of_malformed: list[str] = index["examples"]
        self._ends = np.load(folder / "ends.npy")
        self._tokens = _mapped(folder / "tokens.bin", token_dtype(index["vocab"]))
        self._targets = _mapped(folder / "targets.bin", np.dtype(bool))
        self.lengths = np.diff(self._ends, prepend=0)
        self.target_counts = np.load(folder / "target_counts.npy")

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Its ids and which of them an assistant is to learn."""
        end = self._ends[number]
        part = slice(end - self.lengths[number], end)
        return self._tokens[part], self._targets[part]


def prepare_rows(
    data_set: DataSet, tokenizer: Tokenizer, longest: int, progress: Progress | None = None
) -> RenderedRows:
    """Download and render whatever has not been before. Safe to call on every rank."""
    content = _content_key(data_set, progress)
    folder = cache_dir() / "chat" / digest(VERSION, data_set.format, content, tokenizer.sha256, longest)[:32]

    def build(unfinished: Path) -> None:
        _render(unfinished, data_set, tokenizer, longest, progress)

    return RenderedRows(build_once(folder, build, _is_whole))


def rows_at_hand(data_set: DataSet) -> int | None:
    """How many rows the source has; none if that takes a download. Generated sets have what the recipe asks for."""
    if data_set.format in GENERATED:
        return data_set.rows
    if data_set.format == "questions":
        return sum(1 for _ in builtin_questions())
    files = source_files(data_set, download=False)
    return None if files is None else sum(count_rows(path) for path in files)


def _content_key(data_set: DataSet, progress: Progress | None) -> list[Any]:
    """Of all that the rows depend on, the source's content first."""
    if data_set.format == "questions":
        return [builtin_sha256(builtin_text())]
    if data_set.format in GENERATED:
        return [_words_key(data_set), data_set.rows, data_set.split, digest(QUESTIONS)]
    files = source_files(data_set, progress) or []
    if data_set.source.startswith("hub:"):  # whose cache knows the hashes of its gigabytes
        return [hub_fingerprint(path) for path in files]
    return [sha256_of_file(path) for path in files]


def _words_key(data_set: DataSet) -> str:
    if data_set.source == "builtin":
        return builtin_sha256(builtin_text())
    return sha256_of_file(_words_file(data_set))


def _words_file(data_set: DataSet) -> Path:
    if data_set.source == "system":
        system_words()  # says what to do where there is none
        return SYSTEM
    return (source_files(data_set) or [])[0]


def _words(data_set: DataSet) -> list[str]:
    if data_set.source == "builtin":
        return builtin_words()
    return system_words() if data_set.source == "system" else read_words(_words_file(data_set))


def conversations_of(data_set: DataSet) -> Iterator[list[Turn] | Malformed]:
    """Every row of the source as a conversation, or what is wrong with it."""
    if data_set.format == "questions":
        yield from builtin_questions()
        return
    if data_set.format in GENERATED:
        words = _words(data_set)
        make = spelling_bee
        if data_set.format == "simple_spelling":
            words, make = shuffled_words(words), simple_spelling
        for number in range(data_set.rows or 0):
            yield make(words, number, data_set.split)
        return
    read = READERS[data_set.format]
    for path in source_files(data_set) or []:
        for number, row in enumerate(read_rows(path), start=1):
            try:
                yield read(row)
            except Malformed as error:
                yield Malformed(f"{path.name} row {number}: {error}")


def _render(folder: Path, data_set: DataSet, tokenizer: Tokenizer, longest: int, progress: Progress | None) -> None:
    total = rows_at_hand(data_set) or 0
    dtype: np.dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    target_counts: list[int] = []
    malformed: list[str] = []
    done = 0
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "targets.bin").open("wb") as targets:
        conversations = conversations_of(data_set)
        while rows := list(islice(conversations, _ROWS_AT_ONCE)):
            malformed += [str(row) for row in rows if isinstance(row, Malformed)]
            good = [row for row in rows if not isinstance(row, Malformed)]
            for ids, is_target in render_batch(good, tokenizer, longest):
                tokens.write(ids.astype(dtype).tobytes())
                targets.write(is_target.tobytes())
                lengths.append(len(ids))
                target_counts.append(int(is_target.sum()))
            done += len(rows)
            if progress:
                progress(f"rendering {data_set.name}", done, max(total, done))
    if not lengths and not malformed:
        raise DataError(f"{data_set.name} has no rows; check its source")
    np.save(folder / "ends.npy", np.cumsum(np.array(lengths, dtype=np.int64)))
    np.save(folder / "target_counts.npy", np.array(target_counts, dtype=np.int64))
    index = {
        "vocab": tokenizer.vocab_size,
        "tokens": int(sum(lengths)),
        "malformed": len(malformed),
        "examples": malformed[:SHOWN],
        "identity": digest(*(sha256_of_file(folder / name) for name in ("tokens.bin", "targets.bin", "ends.npy"))),
    }
    (folder / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        size = token_dtype(index["vocab"]).itemsize * index["tokens"]
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "targets.bin")]
        return sizes == [size, index["tokens"]] and all((folder / name).is_file() for name in _ARRAYS)
    except (OSError, ValueError, KeyError):
        return False


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)
