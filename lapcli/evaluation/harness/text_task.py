"""Bits per byte of held-out text, document by document: each is read from <|bos|> on, in windows of the context.

The validation of `lap train` walks the same text as one stream, in which a document has its predecessors before it, so
that its number is a little lower.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.file_lists import local_files
from lapcli.data.text.formats import read_batches
from lapcli.data.text.tokens import prepare_text
from lapcli.evaluation.harness.documents import Document, Documents
from lapcli.measures.bigram import bits_per_byte
from lapcli.recipe.schema import LanguageModelRecipe
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import sha256_of_file

VERSION = 1
METRIC = "bits_per_byte"


def text_documents(run: Run, data: Path | None) -> Documents:
    """The run's own held-out text, as much as its validation reads, or local text files (`DIR/text`, or DIR)."""
    if data is not None:
        return _local(data / "text" if (data / "text").is_dir() else data)
    recipe = run.recipe
    if not isinstance(recipe, LanguageModelRecipe):
        raise UsageError(f"bpb: a run of {recipe.objective} has no text held out; give --data DIR with text files")
    prepared = prepare_text(recipe.data, recipe.tokenizer)
    tokens = prepared.validation.read(0, min(len(prepared.validation), recipe.validation.tokens))
    starts = np.flatnonzero(tokens == prepared.tokenizer.bos)
    parts = [part[part != prepared.tokenizer.bos] for part in np.split(tokens, starts)]
    texts = [prepared.tokenizer.decode(part.tolist()) for part in parts if len(part)]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return _documents(texts, {f"held-out text of {recipe.data.train}": digest})


def text_task(name: str, documents: Documents) -> dict[str, Any]:
    def load(**_: Any) -> dict[str, Documents]:
        return {"test": documents}

    return {
        "task": name,
        "custom_dataset": load,
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": _nothing,
        "doc_to_target": _text,
        "num_fewshot": 0,
        "process_results": _nats_and_bytes,
        "metric_list": [{"metric": METRIC, "aggregation": bits_of_all, "higher_is_better": False}],
        "metadata": {"version": VERSION},
    }


def bits_of_all(pairs: Sequence[tuple[float, int]]) -> float:
    """Of (log-likelihood, bytes) of the documents."""
    return bits_per_byte(-sum(nats for nats, _ in pairs), sum(count for _, count in pairs), "bpb: the text")


def standard_error(pairs: Sequence[tuple[float, int]]) -> float | None:
    """Of a ratio of sums over documents, to first order."""
    n = len(pairs)
    if n < 2:
        return None
    ratio, total = bits_of_all(pairs), sum(count for _, count in pairs)
    squares = sum((-nats / math.log(2) - ratio * count) ** 2 for nats, count in pairs)
    return math.sqrt(squares * n / (n - 1)) / total


def _local(place: Path) -> Documents:
    texts: list[str] = []
    paths = local_files(str(place), None)
    for path in paths:
        for _, batch in read_batches(path, name=str(path), column="text", separator=None):
            texts += [text for text in batch if text]
    return _documents(texts, {str(path): sha256_of_file(path) for path in paths})


def _documents(texts: list[str], files: dict[str, str]) -> Documents:
    if not texts:
        raise UsageError(f"bpb: there is no text in {next(iter(files), 'the data')}; name other files with --data")
    return Documents([{"text": text} for text in texts], files)


def _text(document: Document) -> str:
    return str(document["text"])


def _nothing(_: Document) -> str:
    return ""


def _nats_and_bytes(document: Document, results: Sequence[float]) -> dict[str, tuple[float, int]]:
    return {METRIC: (results[0], len(document["text"].encode()))}
