import errno
import gzip
import json
import os
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lapcli.data import files
from lapcli.data.files import build_once, read_documents
from lapcli.runtime.errors import DataError, LapError


def read(path, column="text"):
    batches = list(read_documents(path, column))
    assert batches[-1][0] == 1.0
    assert [share for share, _ in batches] == sorted(share for share, _ in batches)
    return [document for _, documents in batches for document in documents]


def written(path, content):
    if isinstance(content, str):
        content = content.encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_by_row_groups_with_nulls(tmp_path, kind):
    texts = ["one", None, "", "vier\r\n"] * 5
    table = pa.table({"id": range(20), "text": pa.array(texts).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3, compression="zstd")
    assert read(tmp_path / "a.parquet") == texts


def test_a_wrong_parquet_column_lists_the_existing_columns(tmp_path):
    pq.write_table(pa.table({"id": [1], "content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet.*no column text; it has id, content"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet.*id is int, not text"):
        read(tmp_path / "a.parquet", column="id")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl_with_blank_lines_and_nulls(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "_ROWS", 2)
    texts = ["one\n", None, "", "\ud83d\ude00 é \u2028", "last"]
    lines = [json.dumps({"id": 1, "text": text}) + "\n" for text in texts]
    path = written(tmp_path / name, "\ufeff" + "\n".join(lines).rstrip("\n"))
    assert read(path) == ["one\n", None, "", "\U0001f600 é \u2028", "last"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a.jsonl:3 is not a line of JSON"),
        ('{"txt": "x", "n": 1}', r"a.jsonl, row 2, has no column text; it has txt, n"),
        ('{"text": 5}', r"a.jsonl, row 2: text is int"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line_number(tmp_path, line, message):
    path = written(tmp_path / "a.jsonl", '{"text": "fine"}\n\n' + line + '\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_without_byte_order_mark_and_with_plain_newlines(tmp_path, name):
    path = written(tmp_path / name, "\ufeffé one\r\n\r\ntwo\r three\r")
    assert read(path) == ["é one\n\ntwo\n three\n"]


def test_text_that_is_not_utf8_is_named(tmp_path):
    for encoding in ("latin-1", "utf-16"):
        with pytest.raises(DataError, match=r"a\.txt cannot be read"):
            read(written(tmp_path / "a.txt", "Übel\n".encode(encoding)))
    with pytest.raises(DataError, match=r"b\.jsonl:1 "):
        read(written(tmp_path / "b.jsonl", '{"text": "plain"}\n'.encode("utf-16le")))


def test_csv_and_json_rows(tmp_path):
    (tmp_path / "a.csv").write_text('text,n\n"one, two",1\n')
    (tmp_path / "a.json").write_text('[{"text": "one, two"}]')
    for name in ("a.csv", "a.json"):
        assert read(tmp_path / name) == ["one, two"]


def fill(folder):
    (folder / "content").write_text("whole")


def is_intact(folder):
    return (folder / "content").is_file() and (folder / "content").read_text() == "whole"


def test_one_process_builds_and_the_others_wait(tmp_path):
    built = []

    def slow(folder):
        built.append(1)
        time.sleep(0.2)
        fill(folder)

    # flock belongs to the open file, so threads exclude each other as processes do.
    place = tmp_path / "a" / "key"
    threads = [threading.Thread(target=build_once, args=(place, slow, is_intact)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert is_intact(build_once(place, slow, is_intact))
    assert len(built) == 1


@pytest.mark.parametrize(
    ("error", "raised", "named"),
    [
        (DataError("the reason"), DataError, "the reason"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), LapError, "key .*LAP_CACHE"),
    ],
)
def test_a_failed_build_leaves_nothing_and_keeps_its_error(tmp_path, error, raised, named):
    def fail(folder):
        fill(folder)
        raise error

    with pytest.raises(raised, match=named):
        build_once(tmp_path / "key", fail, is_intact)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert is_intact(build_once(tmp_path / "key", fill, is_intact))


def test_an_interrupted_waiter_does_not_disturb_the_builder(tmp_path, monkeypatch):
    def build(folder):
        def interrupted(self):
            raise KeyboardInterrupt

        fill(folder)
        with monkeypatch.context() as patch:
            patch.setattr(files.FileLock, "acquire", interrupted)
            with pytest.raises(KeyboardInterrupt):
                build_once(tmp_path / "key", fill, is_intact)
        assert is_intact(folder)

    assert is_intact(build_once(tmp_path / "key", build, is_intact))
