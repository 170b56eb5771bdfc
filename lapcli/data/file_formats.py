"""Readers of all data files: rows of parquet, jsonl, json and csv, and documents of these and of plain text.

Files are read in small batches; only a json list and a text file without a separator are read as a whole. Errors name
the file as in the recipe, and the row, line or byte.
"""

import codecs
import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lapcli.runtime.errors import DataError
from lapcli.runtime.files import open_to_read, read_bytes

if TYPE_CHECKING:
    import pyarrow.parquet as pq

Batch = tuple[float, list[str | None]]  # the share of the file read so far, and the next documents; None for null

#: Suffixes of files that text is read from.
DOCUMENT_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".txt", ".txt.gz")
#: Suffixes of files that conversations and word lists are read from.
ROW_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv", ".txt")
BATCH_BYTES = 1 << 20
_BATCH_ROWS = 1024
LONGEST_LINE = 1 << 28  # bytes of a row of JSON
_MOST_TIMES = 200  # largest factor by which an archive may grow when it is unpacked; for text it is 3 to 20
# The four-byte marks come first, because that of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_rows(path: Path) -> Iterator[Any]:
    """Yield rows as dictionaries (csv: lists of cells), without checking their content."""
    name = path.name
    if not name.endswith(ROW_SUFFIXES):  # blobs of the hub's cache have no suffix, but the links to them do
        raise DataError(f"{path} is not a file of rows; expected one of {', '.join(ROW_SUFFIXES)}")
    try:
        if name.endswith(".parquet"):
            with _open_parquet(path, str(path)) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    yield from batch.to_pylist()
        elif name.endswith(".csv"):
            content = read_bytes(path)
            if 0 in content:  # UTF-16 or UTF-32 would be read as UTF-8 full of zero bytes
                raise DataError(f"{path} {zero_bytes(content)}")
            with path.open(encoding="utf-8", newline="") as lines:
                yield from csv.reader(lines)
        elif name.endswith(".json"):
            rows = json.loads(read_bytes(path).decode("utf-8-sig"))
            if not isinstance(rows, list):
                raise DataError(f"{path} is not a JSON list of rows")
            yield from rows
        else:
            with open_to_read(path) as raw:
                for place, line in _json_lines(raw, str(path)):
                    yield _parse_json(line, place)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({_first_line(error)}); correct it or download it again") from None


def count_rows(path: Path) -> int:
    """Count the rows, from the footer of a parquet file; other files are read to the end."""
    if path.name.endswith(".parquet"):
        with _open_parquet(path, str(path)) as file:
            return int(file.metadata.num_rows)
    return sum(1 for _ in read_rows(path))


def read_documents(path: Path, *, name: str, column: str, separator: str | None) -> Iterator[Batch]:
    """Read the documents of a file in batches; errors use `name`, the file's name in the recipe and not in a cache."""
    if name.endswith(".parquet"):
        return _parquet_documents(path, name, column)
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _jsonl_documents(path, name, column)
    return _text_documents(path, name, separator)


def is_text(name: str) -> bool:
    return name.endswith((".txt", ".txt.gz", ".md"))


@contextmanager
def _open_parquet(path: Path, name: str) -> "Iterator[pq.ParquetFile]":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{name} is not a complete parquet file ({_first_line(error)}); download or copy it again"
        ) from error


def _parquet_documents(path: Path, name: str, column: str) -> Iterator[Batch]:
    import pyarrow as pa

    with _open_parquet(path, name) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise _no_column(name, column, names)
        if names.count(column) > 1:
            raise DataError(
                f"{name} has {names.count(column)} columns {column}; rename one, or set data.column to another"
            )
        kind = file.schema_arrow.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{name}: column {column} holds {kind}, not text; set data.column to another")
        rows = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            rows += batch.num_rows
            yield rows / max(file.metadata.num_rows, 1), batch.column(0).to_pylist()


def _jsonl_documents(path: Path, name: str, column: str) -> Iterator[Batch]:
    size = max(path.stat().st_size, 1)
    documents: list[str | None] = []
    waiting = 0
    with open_to_read(path) as raw:
        for place, line in _json_lines(raw, name):
            row = _parse_json(line, place)
            if not isinstance(row, dict):
                raise DataError(f"{place} is not a JSON object with a {column} key")
            if column not in row:
                raise _no_column(place, column, list(row))
            document = row[column]
            if document is not None and not isinstance(document, str):
                kind = type(document).__name__
                raise DataError(f"{place}: {column} is {kind}, not text; set data.column to another")
            documents.append(document)
            waiting += len(line)
            if waiting > BATCH_BYTES:
                # `raw` is the packed file, whose size is known; the unpacked size is not.
                yield raw.tell() / size, documents
                documents, waiting = [], 0
        yield 1.0, documents


def _json_lines(raw: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield `file:line` and the line, without blank lines."""
    with _unpacked(raw, name) as unpacked:
        number = 0
        # One byte more than allowed, so that a line that is too long shows itself without being read whole.
        while line := unpacked.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{name}:{number} is longer than {LONGEST_LINE >> 20} MB; is it really one row? Split it"
                )
            if line.strip():
                yield f"{name}:{number}", line


def _parse_json(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if b"\0" in line:  # never valid in JSON
            raise DataError(f"{place} {zero_bytes(line)}") from None
        raise DataError(f"{place} is not a line of JSON ({_first_line(error)}); correct or remove it") from None


def _text_documents(path: Path, name: str, separator: str | None) -> Iterator[Batch]:
    """Yield the file as one document, or the texts between separators without surrounding newlines."""
    size = max(path.stat().st_size, 1)
    if separator is None:
        with open_to_read(path) as raw:
            yield 1.0, ["".join(_characters(raw, name))]
        return
    # `_characters` turns CRLF into LF, so a separator with CRLF would never be found.
    separator = separator.replace("\r\n", "\n")
    begun = [""]  # blocks of the document that has not ended yet
    with open_to_read(path) as raw:
        for characters in _characters(raw, name):
            # Only the last block is searched again, which may end in a part of a separator: a file without separators
            # is not searched from its beginning for every block.
            last = begun.pop()
            *complete, rest = (last + characters).split(separator)
            if complete:
                complete[0] = "".join(begun) + complete[0]
                begun = [rest]
            else:
                begun += [last, characters] if len(characters) >= len(separator) else [rest]
            yield raw.tell() / size, [document.strip("\n") for document in complete]
    yield 1.0, ["".join(begun).strip("\n")]


def _characters(raw: BinaryIO, name: str) -> Iterator[str]:
    """Decode UTF-8 without a byte-order mark and with LF for CRLF, in pieces that never split a CRLF."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held = ""
    read = 0
    with _unpacked(raw, name) as unpacked:
        while True:
            block = unpacked.read(BATCH_BYTES)
            try:
                characters = held + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{name} is not UTF-8 (near byte {read + error.start:,}); convert it, such as with "
                    f"`iconv -f {wide_encoding(block) if read == 0 else 'latin1'} -t utf-8`"
                ) from None
            if "\0" in characters:
                raise DataError(f"{name} {zero_bytes(block, read)}")
            read += len(block)
            # A CR at the end of a block is held back, since its LF may begin the next one; the last block has no next.
            held = "\r" if block and characters.endswith("\r") else ""
            yield characters.removesuffix(held).replace("\r\n", "\n")
            if not block:
                return


def zero_bytes(block: bytes, start: int = 0) -> str:
    """Describe the zero bytes in a text and how to correct them; `start` is the block's offset in its file."""
    where = f"has zero bytes, the first near byte {start + max(block.find(0), 0):,}"
    if block.count(0) * 10 < len(block):
        return f"{where}; remove them, such as with `tr -d '\\000'`"
    encoding = wide_encoding(block)
    return f"{where}, and seems to be {encoding.upper()}; convert it, such as with `iconv -f {encoding} -t utf-8`"


def wide_encoding(block: bytes) -> str:
    """Guess the encoding of a text that is not UTF-8, by its byte-order mark or the places of its zero bytes."""
    for mark, encoding in _MARKS.items():
        if block.startswith(mark):
            return encoding
    start = block[: 1 << 12]
    zeros = [start[place::4].count(0) for place in range(4)]
    most = len(start) // 5  # most of a quarter
    if not sum(zeros):
        return "latin1"
    if min(zeros[2:]) > most or min(zeros[:2]) > most:  # UTF-32: only rare symbols use the two high bytes
        return "utf-32le" if min(zeros[2:]) > most else "utf-32be"
    return "utf-16le" if zeros[1] + zeros[3] > zeros[0] + zeros[2] else "utf-16be"


class _Archive(gzip.GzipFile):
    """A gzip file that fails if it unpacks to more than any text would: a few kilobytes could fill the memory."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        super().__init__(fileobj=raw)
        # A mebibyte is harmless, however small the archive.
        self._most = max(_MOST_TIMES * os.fstat(raw.fileno()).st_size, BATCH_BYTES)
        self._called = name

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        self._check()
        return block

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(size)
        self._check()
        return line

    def _check(self) -> None:
        if self.tell() > self._most:
            raise DataError(
                f"{self._called} unpacks to more than {_MOST_TIMES} times its size, which no text does; inspect it, "
                "and unpack it yourself if its size is intended"
            )


@contextmanager
def _unpacked(raw: BinaryIO, name: str) -> Iterator[Any]:
    """Yield a file's bytes, unpacked if the name ends in .gz; DataError for a damaged archive."""
    try:
        yield _Archive(raw, name) if name.endswith(".gz") else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{name} is not a complete gzip file ({error}); download or copy it again") from None


def _no_column(place: str, column: str, present: Sequence[str]) -> DataError:
    it_has = ", ".join(map(str, present[:50])) or "none"
    return DataError(f"{place} has no column {column}; it has {it_has}: name one with --set data.column=NAME")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
