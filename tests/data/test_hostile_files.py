"""Files from anywhere, and a seeded fuzz of the readers: what is wrong is a sentence, never another error or a hang."""

import contextlib
import io
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import run_main
from sweep_support import write_recipe

from lapcli import checkpoint
from lapcli.checkpoint import read_tensors
from lapcli.commands.options import overrides
from lapcli.data.file_formats import read_documents, read_rows
from lapcli.data.images.image_set import decode
from lapcli.data.images.tables import open_tables
from lapcli.data.text.tokenizer import Tokenizer, train_tokenizer
from lapcli.evaluation.ade20k import decode_labels
from lapcli.runtime.errors import DataError, LapError
from lapcli.runtime.files import read_json, write_json


def png(shade: int = 0, form: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), shade, dtype=np.uint8)).save(content, form)
    return content.getvalue()


def image_table(folder: Path, labels: list[int]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    images = [{"bytes": png(number), "path": None} for number in range(len(labels))]
    pq.write_table(pa.table({"image": images, "label": labels}), folder / "train-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("content", [b"DDS |" + bytes(123), b"DDS ", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM" + bytes(9)])
def test_beginnings_of_image_formats_are_refused(content):
    with pytest.raises(DataError, match="f cannot be decoded as an image"):
        decode(content, "f")


def test_a_label_beyond_all_classes_names_its_row(tmp_path, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="row 2 has the label 1000000000"):
        open_tables(str(image_table(tmp_path / "set", [0, 1, 10**9, 1])), None, None, None)


def test_a_word_of_any_length_changes_nothing_for_ordinary_text():
    """And is cut where it is long: the trainer would take minutes for this one."""
    text = ["the cat sat on the mat while one dog ran round it, " * 20]
    plain = train_tokenizer(text, 280, max_chars=10**6, crop=10**6)
    assert train_tokenizer([*text, "\x00" * 10**6], 280, max_chars=10**7, crop=10**7).vocab_size == plain.vocab_size
    pieces = "".join(text) + "x" * 5000 + " " * 5000 + "-" * 5000
    from lapcli.data.text import tokenizer

    cut = list(tokenizer._excerpts([pieces], 10**6, 10**6))
    assert "".join(cut) == pieces
    assert list(tokenizer._excerpts(text, 10**6, 10**6)) == text


def test_long_texts_have_the_ids_of_the_whole(monkeypatch):
    """A line of 50 MB is encoded in parts: as a whole it took nine gigabytes."""
    from lapcli.data.text import tokenizer as module

    tokenizer = train_tokenizer(["the cat sat on 12 mats, it's fine\n\n  ok " * 40], 280, max_chars=10**6, crop=10**6)
    chance = random.Random(17)
    signs = ["a", "b", "1", " ", "  ", "\n", "\n\n", "\r\n", "\t", ".", "'s", "\u3000", "é", "中", "\u200b", "<|bos|>"]
    texts = ["a b".join("".join(chance.choices(signs, k=9)) for _ in range(30)) for _ in range(100)]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(module, "_UNBROKEN", 100)  # beyond which a text without a blank is cut anywhere
    monkeypatch.setattr(module, "ENCODED_AT_ONCE", 64)
    monkeypatch.setattr(module, "PIECE", 1)
    assert all(len(list(module.cut_at_blanks(text, 1))) > 10 for text in texts)
    assert tokenizer.encode_batch(texts) == whole
    assert tokenizer.decode(tokenizer.encode_batch(["x" * 5000])[0]) == "x" * 5000


def test_names_that_no_file_or_recipe_can_have(capsys, tmp_path, monkeypatch):
    """5,000 letters, and bytes that are not UTF-8: one sentence that can be read."""
    monkeypatch.chdir(tmp_path)
    long, recipe = "x" * 5000, str(write_recipe(tmp_path))
    for line in (
        ["train", long],
        ["train", recipe, "--name", long],
        ["train", recipe, "--data", long],
        ["train", recipe, "--runs-dir", long],
        ["eval", "--run", long],
        ["report", "--runs-dir", long],
        ["train", recipe, "--data", os.fsdecode(b"te\xffxt")],
    ):
        code, _, err = run_main(capsys, *line)
        assert code == 2, (line[0], err[:1000])
        assert "Traceback" not in err
        assert len(err) < 1000


def test_a_name_with_an_emoji_is_a_name():
    from lapcli.recipe.reading import read_plain

    assert overrides(None, Path("\U0001f600.txt"))[0] == 'data.train="\U0001f600.txt"'
    assert read_plain("\U0001f600.txt") == "\U0001f600.txt"


# Fuzzing: each reader is given damaged copies of good files. LAP_FUZZ_SEED repeats a run.

SEED = int(os.environ.get("LAP_FUZZ_SEED") or (17 if os.environ.get("CI") else random.SystemRandom().randrange(2**32)))


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or put in; sometimes others altogether."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        place, length = chance.randrange(len(changed) + 1), chance.choice([1, 1, 2, 4, 8, 64])
        action = chance.randrange(6)
        if action == 0:
            changed[place : place + length] = chance.randbytes(length)
        elif action == 1:
            del changed[place : place + length]
        elif action == 2:
            changed[place:place] = changed[place : place + length]
        elif action == 3:
            changed[place : place + length] = chance.choice([b"\0", b"\xff", b"[", b"{", b'"', b"9"]) * length
        elif action == 4:
            del changed[place:]
        else:
            changed[place:place] = chance.choice([b"[" * 5000, b"\xef\xbb\xbf", b"1e999", b"null", b"\\ud800", b"\r\n"])
    return bytes(changed)


def consume(batches: Iterator[object]) -> None:
    for _ in batches:
        pass


def readers(folder: Path) -> dict[str, tuple[str, bytes, Callable[[Path], object]]]:
    """By name: a file's name, a good content, and what reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import save

    from lapcli.data.chat.conversation import Malformed, conversation

    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["one", "two", None] * 20, "n": list(range(60))}), table)
    lines = b"".join(json.dumps({"text": f"document {number}"}).encode() + b"\n" for number in range(20))
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 3, 270, max_chars=1000, crop=1000)
    tokenizer.save(folder / "good.json")
    write_json(folder / "run.json", {"status": "finished", "step": 4, "versions": {"lap": "0.2"}})

    def documents(path: Path) -> None:
        consume(read_documents(path, column="text", separator=None))

    def conversations(path: Path) -> None:
        for row in read_rows(path):
            with contextlib.suppress(Malformed):
                conversation(row)

    def checkpoint_state(path: Path) -> None:
        checkpoint.read(path.parent)

    labels = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(labels, "PNG")

    def scene(path: Path) -> None:
        decode_labels(path.read_bytes(), "f", (8, 8))

    images = {form: (f"f.{form.lower()}", png(90, form), lambda path: decode(path.read_bytes(), "f")) for form in FORMS}
    return {
        "parquet": ("f.parquet", table.getvalue(), documents),
        "jsonl": ("f.jsonl", lines, documents),
        "text": ("f.txt", "some text\r\nof some lines ☃\n".encode() * 9, documents),
        "csv": ("f.csv", b'a,"b\nc",d\n' * 9, lambda path: consume(read_rows(path))),
        "json": ("f.json", json.dumps([turns] * 3).encode(), lambda path: consume(read_rows(path))),
        "chat": ("f.jsonl", (json.dumps(turns) + "\n").encode() * 9, conversations),
        "tokenizer": ("f.json", (folder / "good.json").read_bytes(), Tokenizer.from_file),
        "safetensors": ("f.safetensors", save({"a": np.ones((4, 4), np.float32), "b": np.ones(3)}), read_tensors),
        "run.json": ("run.json", (folder / "run.json").read_bytes(), lambda path: read_json(path, "again")),
        "state.json": ("state.json", b'{"step": 1, "files": {}, "sha256": ""}', checkpoint_state),
        "ade20k": ("f.png", labels.getvalue(), scene),
        **images,
    }


FORMS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
READERS = ["parquet", "jsonl", "text", "csv", "json", "chat", "tokenizer", "safetensors", "run.json", "state.json"]
READERS += ["ade20k", *FORMS]


def fuzz(reader: str, folder: Path, seconds: float, at_least: int) -> None:
    name, content, read = readers(folder)[reader]
    path = folder / "fuzz" / name
    path.parent.mkdir(exist_ok=True)
    ends, number = time.monotonic() + seconds, 0
    while number < at_least or time.monotonic() < ends:
        number += 1
        path.write_bytes(damaged(content, random.Random(f"{SEED} {reader} {number}")))
        try:
            read(path)
        except LapError:
            continue
        except Exception as error:
            raise AssertionError(f"LAP_FUZZ_SEED={SEED}: {reader}, damage {number}: {error!r}") from error
    print(f"{reader}: {number} damaged files")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("reader", READERS)
def test_fuzz(reader, tmp_path):
    print(f"LAP_FUZZ_SEED={SEED}")
    fuzz(reader, tmp_path, 0, 150)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("reader", READERS)
def test_fuzz_for_an_hour(reader, tmp_path):
    print(f"LAP_FUZZ_SEED={SEED}")
    fuzz(reader, tmp_path, 3600 / len(READERS), 1000)
