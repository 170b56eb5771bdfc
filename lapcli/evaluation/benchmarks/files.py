"""Where the rows of a benchmark are, on the hub or in a local folder, and how they become documents.

`--data DIR` is a folder that holds the benchmarks' folders (`DIR/arc`, `DIR/mmlu` ...), or one of these. In each of
them the first form that exists is read; a benchmark that is missing there is an error, never another source.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lapcli.data.chat.conversation import Malformed
from lapcli.data.file_formats import read_rows
from lapcli.data.source_files import cached_hub_files, hub_files, unreachable
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file

Document = dict[str, Any]


class Documents(list[Document]):
    """As much of a data set as lm-eval looks at; `files` are those that were read, with their sha256."""

    def __init__(self, documents: Sequence[Document], files: Mapping[str, str]) -> None:
        super().__init__(documents)
        self.files = dict(files)

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0])

    def by(self, key: str) -> "dict[str, Documents]":
        """The documents of each value of a key, in their order."""
        groups: dict[str, Documents] = {}
        for document in self:
            groups.setdefault(document[key], Documents([], self.files)).append(document)
        return groups


@dataclass(frozen=True)
class BenchmarkFiles:
    repository: str  # on the hub
    hub: Mapping[str, str]  # split: its file there
    folders: Sequence[str]  # names of its folder within DIR, the usual one first
    local: Mapping[str, Sequence[str]]  # split: patterns of files in that folder, the first that matches is read

    def find(self, benchmark: str, split: str, data: Path | None) -> list[Path]:
        """Files on this machine, downloaded if need be, in the order in which they are read."""
        if data is None:
            return self._from_hub(benchmark, split)
        if not data.is_dir():
            raise DataError(
                f"--data {data} is not a folder; it holds the benchmarks' folders, such as {self.folders[0]}"
            )
        patterns = self.local[split]
        for folder in [*(data / name for name in self.folders), data]:
            for pattern in patterns:
                if paths := sorted(path for path in folder.glob(pattern) if path.is_file()):
                    return paths
        usual = data if data.name in self.folders else data / self.folders[0]
        raise DataError(
            f"{benchmark}: there is no {split} file in {data}; expected {usual / patterns[0]}, or "
            f"{', '.join(patterns[1:4])} beside it"
        )

    def _from_hub(self, benchmark: str, split: str) -> list[Path]:
        name = self.hub[split]
        if cached := cached_hub_files(self.repository, [name], None):
            return cached
        problem = "HF_HUB_OFFLINE is set" if hub_is_offline() else unreachable()
        if problem is None:
            try:
                return hub_files(self.repository, [name], None)
            except DataError as error:
                problem = str(error.__cause__ or error).splitlines()[0][:200]
        raise DataError(
            f"{benchmark}: {name} of the hub's {self.repository} is not on this machine and cannot be downloaded "
            f"({problem}); put {self.local[split][0]} into DIR/{self.folders[0]} and use --data DIR, or run "
            f"`hf download --repo-type dataset {self.repository} {name}` where there is a network"
        )


def plain_names(split: str, name: str) -> tuple[str, ...]:
    """The obvious names of a file: `test.jsonl`, `gsm8k_test.parquet` ..."""
    ends = ("jsonl", "jsonl.gz", "parquet", "csv")
    return tuple(f"{place}.{end}" for place in (split, f"{name}_{split}") for end in ends)


def load_documents(benchmark: str, paths: Sequence[Path], read_row: Callable[[Any, Path], Document]) -> Documents:
    """The rows of the files; one that `read_row` refuses with Malformed is an error with its place."""
    documents: list[Document] = []
    for path in paths:
        for number, row in enumerate(_rows(path), start=1):
            try:
                documents.append(read_row(row, path))
            except Malformed as error:
                raise DataError(
                    f"{benchmark}: {path} row {number} is not a row of {benchmark} ({error}); "
                    "correct it, or check --data"
                ) from None
    if not documents:
        raise DataError(f"{benchmark}: {paths[0]} has no rows; download it again, or check --data")
    return Documents(documents, {str(path): sha256_of_file(path) for path in paths})


def texts_of(row: Any, *names: str) -> Document:
    """These fields of a row, each of which has to be text."""
    for name in names:
        if not isinstance(row, Mapping) or not isinstance(row.get(name), str):
            raise Malformed(f"no text under {name!r}")
    return {name: row[name] for name in names}


def _rows(path: Path) -> Iterator[Any]:
    """A csv with a header gives dictionaries; one without (MMLU's own) lists of cells."""
    rows = read_rows(path)
    if not path.name.endswith(".csv"):
        yield from rows
        return
    first = next(rows, None)
    if first is None:
        return
    if {"question", "answer"} <= set(first) or {"prompt", "test"} <= set(first):
        for row in rows:
            yield dict(zip(first, row, strict=False))
    else:
        yield from chain([first], rows)
