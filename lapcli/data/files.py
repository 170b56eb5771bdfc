"""Reading data files (parquet, jsonl, json, csv, plain text), and cache folders that are built once.

An unreadable file raises a one-sentence error with its path, and the row or line if known.
"""

import csv
import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

from filelock import FileLock

from lapcli.runtime.errors import DataError, LapError
from lapcli.runtime.files import sha256_of_json

#: Suffixes of files that a source may have.
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".txt.gz")
_ROWS = 256


def digest(*parts: object) -> str:
    """Return a cache key: the sha256 of values that JSON can express, the same on every machine."""
    return sha256_of_json(parts)


def build_once(folder: Path, build: Callable[[Path], None], is_intact: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return `folder`, filled by `build` first if it is missing or damaged (not `is_intact`).

    It is filled under a temporary name and then renamed. One process builds it; the others wait for its lock, which
    ends with the process that holds it.
    """
    if is_intact(folder):
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    lock = FileLock(f"{folder}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # on a file system without locks the last process that builds the folder wins
            lock.acquire()
        if not is_intact(folder):  # another process may have built it while this one waited
            for remains in (folder, unfinished):  # damaged, or left by a build that was killed
                shutil.rmtree(remains, ignore_errors=True)
            unfinished.mkdir()
            try:
                build(unfinished)
                unfinished.rename(folder)
            finally:  # with the lock: a process that is interrupted while it waits must not remove another's work
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise LapError(
            f"cannot write {folder} ({error.strerror}); free some space, or set LAP_CACHE to another folder"
        ) from error
    finally:
        lock.release()
    return folder


def read_rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file, without checking their content."""
    for _, rows in _batches(path, None):
        yield from rows


def count_rows(path: Path) -> int:
    """Count the rows, from the footer of a parquet file; other files are read to the end."""
    if path.name.endswith(".parquet"):
        import pyarrow.parquet as pq

        with _readable(path):
            return int(pq.read_metadata(path).num_rows)
    return sum(1 for _ in read_rows(path))


def read_plain_text(path: Path) -> str:
    with _readable(path), path.open("rb") as raw, io.TextIOWrapper(_unpacked(path, raw), "utf-8-sig") as file:
        return file.read()


def is_text(name: str) -> bool:
    return name.endswith((".txt", ".txt.gz", ".md"))


def read_documents(path: Path, column: str = "text") -> Iterator[tuple[float, list[str | None]]]:
    """Yield the fraction of a file read so far and its next documents: those of a column (None for null); a text
    file is one document."""
    if is_text(path.name):
        yield 1.0, [read_plain_text(path)]
        return
    numbers = count(1)
    for fraction, rows in _batches(path, column):
        for row in rows:
            where = f"{path}, row {next(numbers)}"
            if not isinstance(row, dict) or column not in row:
                it_has = ", ".join(map(str, list(row)[:50])) if isinstance(row, dict) else "none"
                raise DataError(f"{where}, has no column {column}; it has {it_has}: name one with data.column")
            if not isinstance(row[column], str | None):
                kind = type(row[column]).__name__
                raise DataError(f"{where}: {column} is {kind}, not text; set data.column to another")
        yield fraction, [row[column] for row in rows]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert exceptions from reading a damaged file into a one-sentence error."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # pyarrow, gzip, csv, json and decoding UTF-8 raise many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{path} cannot be read ({reason}); correct it, or download or copy it again") from error


def _batches(path: Path, column: str | None) -> Iterator[tuple[float, list[Any]]]:
    """Yield the fraction of the file read so far, and the next rows, of a parquet file: only the given column."""
    with _readable(path):
        if path.name.endswith(".parquet"):
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                done, total = 0, max(file.metadata.num_rows, 1)
                # All columns if this column is missing, for the error message.
                columns = [column] if column in file.schema_arrow.names else None
                for batch in file.iter_batches(_ROWS, columns=columns):
                    done += batch.num_rows
                    yield done / total, batch.to_pylist()
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            with path.open("rb") as raw:
                # `raw` is the packed file, whose size is known; the unpacked size is not.
                size, rows = path.stat().st_size, _json_lines(_unpacked(path, raw), path)
                while some := list(islice(rows, _ROWS)):
                    yield raw.tell() / size, some
        elif path.name.endswith(".csv"):
            yield 1.0, list(csv.DictReader(io.StringIO(read_plain_text(path), newline="")))
        elif path.name.endswith(".json") and isinstance(rows := json.loads(read_plain_text(path)), list):
            yield 1.0, rows
        else:  # blobs of the hub's cache have no suffix, but the links to them do
            raise DataError(f"{path} is not a file of rows; expected one of {', '.join(SUFFIXES)}")


def _json_lines(lines: Any, path: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number} is not a line of JSON ({error}); correct or remove it") from None
            yield row


def _unpacked(path: Path, raw: io.BufferedReader) -> Any:
    return gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw
