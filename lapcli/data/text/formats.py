"""Documents out of parquet, jsonl and text files, in small batches, without ever holding a whole corpus.

Every reader yields the share of the file read so far (for progress) and the documents since; a null is None.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lapcli.runtime.errors import DataError

Batch = tuple[float, list[str | None]]

BATCH_BYTES = 1 << 20
# The four-byte marks come first: that of UTF-32 begins as that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_batches(path: Path, *, name: str, column: str, separator: str | None) -> Iterator[Batch]:
    """`name` is how errors call the file: as the recipe does, not as some cache does."""
    if name.endswith(".parquet"):
        return _parquet(path, name, column)
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _jsonl(path, name, column)
    return _text(path, name, separator)


def is_text(name: str) -> bool:
    return name.endswith((".txt", ".txt.gz", ".md"))


def _parquet(path: Path, name: str, column: str) -> Iterator[Batch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise _no_column(name, column, file.schema_arrow.names)
            kind = file.schema_arrow.field(column).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                raise DataError(f"{name}: column {column} holds {kind}, not text; set data.column to another")
            rows = 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                rows += batch.num_rows
                yield rows / max(file.metadata.num_rows, 1), batch.column(0).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name} is not a whole parquet file ({_first_line(error)}); get it again") from error


def _jsonl(path: Path, name: str, column: str) -> Iterator[Batch]:
    size = max(path.stat().st_size, 1)
    documents: list[str | None] = []
    waiting = 0
    with path.open("rb") as raw:
        for number, line in enumerate(_lines(raw, name), start=1):
            if not line.strip():
                continue
            documents.append(_json_document(line, f"{name}:{number}", column))
            waiting += len(line)
            if waiting > BATCH_BYTES:
                yield raw.tell() / size, documents
                documents, waiting = [], 0
        yield 1.0, documents


def _json_document(line: bytes, place: str, column: str) -> str | None:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if b"\0" in line:  # which JSON never has
            raise DataError(f"{place} {zero_bytes(line)}") from None
        raise DataError(f"{place} is not a line of JSON ({_first_line(error)}); mend or remove it") from None
    if not isinstance(row, dict):
        raise DataError(f"{place} is not a JSON object with a {column} key")
    if column not in row:
        raise _no_column(place, column, list(row))
    if row[column] is not None and not isinstance(row[column], str):
        raise DataError(f"{place}: {column} is {type(row[column]).__name__}, not text; set data.column to another")
    return row[column]


def _lines(raw: BinaryIO, name: str) -> Iterator[bytes]:
    with _Unpacked(raw, name) as unpacked:
        while line := unpacked.readline():
            yield line


def _text(path: Path, name: str, separator: str | None) -> Iterator[Batch]:
    """The whole file as one document, or what stands between separators without the newlines around it."""
    size = max(path.stat().st_size, 1)
    if separator is None:
        with path.open("rb") as raw:
            yield 1.0, ["".join(_characters(raw, name))]
        return
    separator = separator.replace("\r\n", "\n")
    rest = ""
    with path.open("rb") as raw:
        for characters in _characters(raw, name):
            *whole, rest = (rest + characters).split(separator)
            yield raw.tell() / size, [document.strip("\n") for document in whole]
    yield 1.0, [rest.strip("\n")]


def _characters(raw: BinaryIO, name: str) -> Iterator[str]:
    """UTF-8 without a byte-order mark, with LF for CRLF, in pieces that never split a CRLF."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held = ""
    read = 0
    with _Unpacked(raw, name) as unpacked:
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
            held = "\r" if block and characters.endswith("\r") else ""
            yield characters.removesuffix(held).replace("\r\n", "\n")
            if not block:
                return


def zero_bytes(block: bytes, start: int = 0) -> str:
    """What is wrong with a text that has zero bytes, and how to mend it; `start` is the block's place in its file."""
    where = f"has zero bytes, the first near byte {start + max(block.find(0), 0):,}"
    if block.count(0) * 10 < len(block):
        return f"{where}; remove them, such as with `tr -d '\\000'`"
    encoding = wide_encoding(block)
    return f"{where}, and seems to be {encoding.upper()}; convert it, such as with `iconv -f {encoding} -t utf-8`"


def wide_encoding(block: bytes) -> str:
    """The encoding of a text that is not UTF-8, by its byte-order mark or by where its zero bytes are."""
    for mark, encoding in _MARKS.items():
        if block.startswith(mark):
            return encoding
    start = block[: 1 << 12]
    zeros = [start[place::4].count(0) for place in range(4)]
    most = len(start) // 5  # of a quarter
    if not sum(zeros):
        return "latin1"
    if min(zeros[2:]) > most or min(zeros[:2]) > most:  # UTF-32: no character needs the two high bytes, but symbols
        return "utf-32le" if min(zeros[2:]) > most else "utf-32be"
    return "utf-16le" if zeros[1] + zeros[3] > zeros[0] + zeros[2] else "utf-16be"


class _Unpacked:
    """A file's bytes, unpacked if the name ends in .gz; a damaged archive is the user's file, not our bug."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        self._name = name
        self._file: Any = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            raise DataError(f"{self._name} is not a whole gzip file ({error}); get it again") from None


def _no_column(place: str, column: str, present: list[str]) -> DataError:
    return DataError(
        f"{place} has no column {column}; it has {', '.join(map(str, present[:50])) or 'none'} (data.column)"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
