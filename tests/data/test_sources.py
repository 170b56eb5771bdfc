import io
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import run_process

from lapcli.data.sources import expand_ranges, local_files
from lapcli.data.text.tokens import describe_source, prepare_text
from lapcli.recipe.schema import TextSource, TokenizerSection
from lapcli.runtime.errors import DataError


def test_a_range_is_an_ordered_list():
    names = expand_ranges("shard_{00000..00239}.parquet")
    assert names == [f"shard_{i:05d}.parquet" for i in range(240)]
    assert expand_ranges("{8..11}.txt") == ["8.txt", "9.txt", "10.txt", "11.txt"]
    assert expand_ranges(["b.txt", "a{1..2}{0..1}.txt"]) == ["b.txt", "a10.txt", "a11.txt", "a20.txt", "a21.txt"]
    assert expand_ranges("no{range}.txt") == ["no{range}.txt"]
    with pytest.raises(DataError, match=r"\{5\.\.4\}"):
        expand_ranges("a{5..4}.txt")


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.jsonl", "c.parquet", "d.txt.gz", "notes.md", "deep/e.txt", "deep/f_1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def found(folder, files=None):
    return [path.relative_to(folder).as_posix() for path in local_files(str(folder), files)]


def test_files_are_read_in_the_order_given(folder):
    assert found(folder, ["c.parquet", "**/*.txt"]) == ["c.parquet", "b.txt", "deep/e.txt", "deep/f_1.txt"]
    assert found(folder, "deep/f_{1..1}.txt") == ["deep/f_1.txt"]


REPOSITORY = "someone/some-text"
TOKENIZER = TokenizerSection(vocab=280)


def parquet(texts):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer, row_group_size=3)
    return buffer.getvalue()


def shards(count):
    return {
        f"shard_{i:05d}.parquet": parquet([f"file {i} text {j} says hello there" for j in range(9)])
        for i in range(count)
    }


@pytest.fixture
def online(hub):
    hub.files = shards(4)
    return hub


def source(**keys):
    return TextSource(**{"train": f"hub:{REPOSITORY}", "files": "shard_{00000..00003}.parquet", **keys})


def test_everything_works_without_the_hub(online, monkeypatch, lap_cache):
    assert "not on this machine: `lap fetch RECIPE`" in describe_source(source())
    first = prepare_text(source(), TOKENIZER)
    assert first.facts["documents"] == 36
    assert len(first.validation) > 0
    asked = len(online.requests)
    assert prepare_text(source(), TOKENIZER).identity == first.identity
    assert len(online.requests) == asked, "existing files were requested again"

    online.stop()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = prepare_text(source(), TOKENIZER)
    assert (again.identity, again.facts) == (first.identity, first.facts)
    # Also from the downloaded files alone, in a process without access to the hub.
    code = (
        "from lapcli.data.text.tokens import prepare_text\n"
        "from lapcli.recipe.schema import TextSource, TokenizerSection\n"
        f"source = TextSource(train='hub:{REPOSITORY}', files='shard_{{00000..00003}}.parquet')\n"
        "print(prepare_text(source, TokenizerSection(vocab=280)).identity)"
    )
    environment = {**os.environ, "LAP_CACHE": str(lap_cache / "other")}
    done = run_process([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first.identity


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": "hub:no/body"}, "data set no/body.*no public data set"),
        ({"revision": "v9"}, "no such revision"),
        ({"files": ["shard_1.parquet"]}, "no file shard_1.parquet"),
        ({"column": "content"}, "shard_00000.parquet.*no column content; it has text"),
    ],
)
def test_faults_are_named(online, keys, message):
    with pytest.raises(DataError, match=message):
        prepare_text(source(**keys), TOKENIZER)


def test_an_unreachable_hub_is_named_with_the_command(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=f"{REPOSITORY}.*cannot be downloaded.*refused.*lap fetch"):
        prepare_text(source(), TOKENIZER)
