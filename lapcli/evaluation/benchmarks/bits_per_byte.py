"""Bits per byte of held-out text, document by document: each starts with <|bos|> and is read in context windows.

The validation of `lap train` reads the same text as one stream, where earlier documents are part of the context,
so its value is slightly lower.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lapcli.data.files import read_documents
from lapcli.data.sources import local_files
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.data.text.tokens import prepare_text
from lapcli.evaluation.benchmarks import Benchmark, Document, Documents, PreparedTask, task_definition
from lapcli.measures.tokens import bits_per_byte
from lapcli.recipe.schema import HELD_OUT_TEXT
from lapcli.runs import TOKENIZER, Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import sha256_of_file

if TYPE_CHECKING:
    from lapcli.evaluation.tasks import Request

VERSION = 1
METRIC = "bits_per_byte"


class BitsPerByte(Benchmark):
    name = "bpb"

    def check(self, gives: frozenset[str], data: Path | None) -> None:
        if data is None and HELD_OUT_TEXT not in gives:
            raise UsageError("bpb: this run has no text held out; give --data DIR with text files")

    def paper_task(self, request: "Request") -> PreparedTask:
        """Score the text itself, without a prompt, under either protocol."""
        documents = _held_out(request.run) if request.data is None else _local(request.data)
        definition = task_definition(
            self.name,
            VERSION,
            output_type="loglikelihood_rolling",
            doc_to_text=lambda document: "",
            doc_to_target=lambda document: document["text"],
            process_results=_nats_and_bytes,
            metric_list=[{"metric": METRIC, "aggregation": bits_of_all, "higher_is_better": False}],
        )
        return self.prepared(definition, {"test": documents}, request)

    lm_eval_task = paper_task


def _held_out(run: Run) -> Documents:
    """Return the part of the run's held-out text that the validation reads."""
    recipe: Any = run.recipe
    # The tokenizer of the run, not of the recipe: with train.init_from they can differ.
    prepared = prepare_text(recipe.data, Tokenizer.from_file(run.path / TOKENIZER))
    tokens = prepared.validation.read(0, min(len(prepared.validation), recipe.validation.tokens))
    starts = np.flatnonzero(tokens == prepared.tokenizer.bos)
    # Without <|bos|>, which the adapter puts before each document.
    parts = [part[part != prepared.tokenizer.bos] for part in np.split(tokens, starts)]
    texts = [prepared.tokenizer.decode(part.tolist()) for part in parts if len(part)]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return _documents(texts, {f"held-out text of {recipe.data.train}": digest})


def bits_of_all(pairs: Sequence[tuple[float, int]]) -> float:
    """Return the bits per byte over all documents, each given as (log-likelihood, bytes)."""
    return bits_per_byte(-sum(nats for nats, _ in pairs), sum(count for _, count in pairs), "bpb: the text")


def _local(data: Path) -> Documents:
    """Read the text files in `DIR/text`, or in DIR."""
    place = data / "text" if (data / "text").is_dir() else data
    texts: list[str] = []
    paths = local_files(str(place))
    for path in paths:
        for _, batch in read_documents(path):
            texts += [text for text in batch if text]
    return _documents(texts, {str(path): sha256_of_file(path) for path in paths})


def _documents(texts: list[str], files: dict[str, str]) -> Documents:
    if not texts:
        raise UsageError(f"bpb: there is no text in {next(iter(files), 'the data')}; name other files with --data")
    return Documents([{"text": text} for text in texts], files)


def _nats_and_bytes(document: Document, results: Sequence[float]) -> dict[str, tuple[float, int]]:
    return {METRIC: (results[0], len(document["text"].encode()))}


BITS_PER_BYTE = BitsPerByte()
