"""Benchmark files in every format, complete real files, and the messages if files are missing."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness_support import QUOTING, write_benchmarks

from lapcli.evaluation.benchmarks import BENCHMARKS
from lapcli.evaluation.benchmarks.choices import ARC_EASY
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file

COUNTS = {"arc_easy": 2376, "arc_challenge": 1172, "mmlu": 14042, "gsm8k": 1319, "humaneval": 164}
FOLDERS = {"arc_easy": "arc", "arc_challenge": "arc"}


@pytest.mark.parametrize("task", COUNTS)
def test_all_rows_of_the_real_files(task, test_data):
    documents = BENCHMARKS[task].documents("test", test_data)
    assert len(documents) == COUNTS[task]
    alone = BENCHMARKS[task].documents("test", test_data / FOLDERS.get(task, task))  # the benchmark's own folder
    assert alone == documents
    for path, digest in documents.files.items():
        assert digest == sha256_of_file(Path(path))


def test_small_files(tmp_path):
    data = write_benchmarks(tmp_path)
    arc = BENCHMARKS["arc_easy"].documents("test", data)
    assert [len(ARC_EASY.parts(document)[1]) for document in arc[:4]] == [4, 4, 3, 5]
    assert arc[2]["question"] == QUOTING
    mmlu = BENCHMARKS["mmlu"].documents("test", data)
    assert [(d["subject"], d["answer"]) for d in mmlu] == [(s, n) for s in ("astronomy", "virology") for n in range(3)]
    assert [d["number"] for d in BENCHMARKS["gsm8k"].documents("test", data)] == ["0", "2", "4", "6", "8"]
    assert BENCHMARKS["humaneval"].documents("test", data)[1]["entry_point"] == "add_1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"question": "x", "answer": "no mark"}\n', "row 1 is not a row of gsm8k (no `#### number`"),
        ('{"prompt": "x"}\n', "row 1 is not a row of gsm8k (no text under 'question'"),
        ("", "has no rows"),
        ("{broken\n", "not a line of JSON"),
    ],
)
def test_bad_files_are_named(tmp_path, content, said):
    (tmp_path / "test.jsonl").write_text(content)
    with pytest.raises(DataError) as error:
        BENCHMARKS["gsm8k"].documents("test", tmp_path)
    assert said in str(error.value)
    assert str(tmp_path / "test.jsonl") in str(error.value)


def test_from_the_hub_and_then_without_it(tmp_path, monkeypatch):
    from data.conftest import HubServer

    rows = [{"question": "One?", "answer": "#### 1"}, {"question": "Two?", "answer": "#### 2"}]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HubServer() as hub:
        hub.repository = "openai/gsm8k"
        hub.files = {"main/test-00000-of-00001.parquet": buffer.getvalue()}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        first = BENCHMARKS["gsm8k"].documents("test", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert BENCHMARKS["gsm8k"].documents("test", None) == first
    assert [document["number"] for document in first] == ["1", "2"]
