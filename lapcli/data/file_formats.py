"""Readers of all data files: rows of parquet, jsonl, json and csv, and documents of these and of plain text.

A file that cannot be read is one sentence with its name in the recipe, and the line where that is known.
"""

import csv
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lapcli.runtime.errors import DataError

Batch = tuple[float, list[str | None]]  # the fraction of the file read so far, and the next documents; None for null

#: Suffixes of files that text is read from.
DOCUMENT_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".txt", ".txt.gz")
#: Suffixes of files that conversations and word lists are read from.
ROW_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv", ".txt")
BATCH_BYTES = 1 << 20
_BATCH_ROWS = 1024


def read_rows(path: Path) -> Iterator[Any]:
    """Yield rows as dictionaries (csv: lists of cells), without checking their content."""
    name = path.name
    if not name.endswith(ROW_SUFFIXES):  # blobs of the hub's cache have no suffix, but the links to them do
        raise DataError(f"{path} is not a file of rows; expected one of {', '.join(ROW_SUFFIXES)}")
    with _readable(str(path)):
        if name.endswith(".parquet"):
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    yield from batch.to_pylist()
        elif name.endswith(".csv"):
            yield from csv.reader(io.StringIO(read_plain_text(path), newline=""))
        elif name.endswith(".json"):
            rows = json.loads(read_plain_text(path))
            if not isinstance(rows, list):
                raise DataError(f"{path} is not a JSON list of rows")
            yield from rows
        else:
            with open(path, "rb") as raw:
                for _, row in _json_lines(raw, str(path)):
                    yield row


def count_rows(path: Path) -> int:
    """Count the rows, from the footer of a parquet file; other files are read to the end."""
    if path.name.endswith(".parquet"):
        import pyarrow.parquet as pq

        with _readable(str(path)):
            return int(pq.read_metadata(path).num_rows)
    return sum(1 for _ in read_rows(path))


def read_plain_text(path: Path) -> str:
    """Return the content of a text file, with its line ends."""
    with _readable(str(path)), open(path, "rb") as raw:
        return _without_zeros(raw.read().decode("utf-8-sig"), str(path))


def read_documents(path: Path, *, name: str, column: str, separator: str | None) -> Iterator[Batch]:
    """Read the documents of a file in batches; errors use `name`, the file's name in the recipe and not in a cache."""
    with _readable(name):
        if name.endswith(".parquet"):
            yield from _parquet_documents(path, name, column)
            return
        with open(path, "rb") as raw:
            size, is_json = max(path.stat().st_size, 1), name.endswith((".jsonl", ".jsonl.gz"))
            batches = _jsonl_documents(raw, name, column) if is_json else _text_documents(raw, name, separator)
            for documents in batches:
                # `raw` is the packed file, whose size is known; the unpacked size is not.
                yield raw.tell() / size, documents
            yield 1.0, []


def is_text(name: str) -> bool:
    return name.endswith((".txt", ".txt.gz", ".md"))


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn what reading a damaged file may raise into one sentence."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 ({error.reason}); convert it, such as with `iconv -f latin1 -t utf-8` (or utf-16)"
        ) from None
    except DataError:
        raise
    except Exception as error:  # pyarrow, gzip, csv and json raise many kinds
        raise DataError(
            f"{name} cannot be read ({_first_line(error)}); correct it, or download or copy it again"
        ) from error


def _parquet_documents(path: Path, name: str, column: str) -> Iterator[Batch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if names.count(column) > 1:
            raise DataError(f"{name} has {names.count(column)} columns {column}; set data.column to another")
        if column not in names:
            raise _no_column(name, column, names)
        kind = file.schema_arrow.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{name}: column {column} holds {kind}, not text; set data.column to another")
        rows = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            rows += batch.num_rows
            yield rows / max(file.metadata.num_rows, 1), batch.column(0).to_pylist()


def _jsonl_documents(raw: BinaryIO, name: str, column: str) -> Iterator[list[str | None]]:
    documents: list[str | None] = []
    characters = 0
    for place, row in _json_lines(raw, name):
        if not isinstance(row, dict) or column not in row:
            raise _no_column(place, column, list(row) if isinstance(row, dict) else [])
        document = row[column]
        if document is not None and not isinstance(document, str):
            kind = type(document).__name__
            raise DataError(f"{place}: {column} is {kind}, not text; set data.column to another")
        documents.append(document)
        characters += len(document or "")
        if characters > BATCH_BYTES:
            yield documents
            documents, characters = [], 0
    yield documents


def _json_lines(raw: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    """Yield `file:line` and the row, without blank lines."""
    for number, line in enumerate(_unpacked(raw, name), start=1):
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                place = f"{name}:{number}"
                raise DataError(f"{place} is not a line of JSON ({_first_line(error)}); correct or remove it") from None
            yield f"{name}:{number}", row


def _text_documents(raw: BinaryIO, name: str, separator: str | None) -> Iterator[list[str | None]]:
    """Yield the file as one document, or the texts between separators without surrounding newlines."""
    if separator is None:
        yield ["".join(_characters(raw, name))]
        return
    # `_characters` turns CRLF into LF, so a separator with CRLF would never be found.
    separator = separator.replace("\r\n", "\n")
    begun = [""]  # blocks of the document that has not ended yet
    for characters in _characters(raw, name):
        # Only the last block is searched again, which may end in a part of a separator: a file without separators is
        # not searched from its beginning for every block.
        last = begun.pop()
        *complete, rest = (last + characters).split(separator)
        if complete:
            complete[0] = "".join(begun) + complete[0]
            begun = [rest]
        else:
            begun += [last, characters] if len(characters) >= len(separator) else [rest]
        yield [document.strip("\n") for document in complete]
    yield ["".join(begun).strip("\n")]


def _characters(raw: BinaryIO, name: str) -> Iterator[str]:
    """Decode UTF-8 without a byte-order mark and with LF for CRLF, in pieces that never split a CRLF."""
    file = io.TextIOWrapper(_unpacked(raw, name), encoding="utf-8-sig", newline="")
    held = ""
    while block := file.read(BATCH_BYTES):
        block = held + _without_zeros(block, name)
        held = "\r" if block.endswith("\r") else ""  # its LF may begin the next block
        yield block.removesuffix(held).replace("\r\n", "\n")
    yield held
    file.detach()  # else it would close `raw`


def _unpacked(raw: BinaryIO, name: str) -> Any:
    return gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw


def _without_zeros(text: str, name: str) -> str:
    if "\0" in text:
        raise DataError(
            f"{name} has zero bytes, as text in UTF-16 has; convert it, such as with `iconv -f utf-16 -t utf-8`"
        )
    return text


def _no_column(place: str, column: str, present: Sequence[str]) -> DataError:
    it_has = ", ".join(map(str, present[:50])) or "none"
    return DataError(f"{place} has no column {column}; it has {it_has}: name one with --set data.column=NAME")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
