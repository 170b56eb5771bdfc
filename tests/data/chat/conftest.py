"""Small data sets of conversations on disk."""

import json

import pytest

from lapcli.data.text.tokenizer import train_tokenizer
from lapcli.recipe.chat import DataSet


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte, then the nine special tokens."""
    return train_tokenizer(["a"], 265, max_chars=10, crop=10)


@pytest.fixture
def data_set(tmp_path):
    """Write rows to a file and return its data set."""

    def write(name, lines, **changes):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
        return DataSet(name=name, format="conversations", source=str(path), **changes)

    return write
