"""Untrusted files, and a seeded fuzz of the readers: faults give one sentence, never another error or a hang."""

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

from lapcli import checkpoint
from lapcli.checkpoint import read_tensors
from lapcli.data.files import read_documents, read_rows
from lapcli.data.images.image_set import decode
from lapcli.data.text.tokenizer import Tokenizer, train_tokenizer
from lapcli.evaluation.ade20k import decode_labels
from lapcli.runtime.errors import LapError
from lapcli.runtime.files import read_json, write_json


def png(shade: int = 0, form: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), shade, dtype=np.uint8)).save(content, form)
    return content.getvalue()


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
    """Name -> a file name, valid content, and its reader."""
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
        consume(read_documents(path))

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
        "chat": ("f.jsonl", (json.dumps(turns) + "\n").encode() * 9, conversations),
        "tokenizer": ("f.json", (folder / "good.json").read_bytes(), Tokenizer.from_file),
        "safetensors": ("f.safetensors", save({"a": np.ones((4, 4), np.float32), "b": np.ones(3)}), read_tensors),
        "run.json": ("run.json", (folder / "run.json").read_bytes(), lambda path: read_json(path, "again")),
        "state.json": ("state.json", b'{"step": 1, "files": {}, "sha256": ""}', checkpoint_state),
        "ade20k": ("f.png", labels.getvalue(), scene),
        **images,
    }


FORMS = ("PNG", "JPEG", "TIFF")
READERS = ["parquet", "jsonl", "text", "chat", "tokenizer", "safetensors", "run.json", "state.json"]
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
@pytest.mark.parametrize("seconds", [0, pytest.param(3600 / len(READERS), marks=pytest.mark.long)])
@pytest.mark.parametrize("reader", READERS)
def test_fuzz(reader, seconds, tmp_path):
    print(f"LAP_FUZZ_SEED={SEED}")
    fuzz(reader, tmp_path, seconds, 150)
