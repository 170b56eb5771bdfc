"""Saved answers: a line of JSON for each document, written as soon as it is scored.

A killed evaluation reads it and resumes. The folder belongs to one set of weights, task and settings, each line to the
exact tokens of a prompt, so that no answer can be stale. Batch size and number of processes are not part of the
key, because they do not change answers. Each process writes its own file.
"""

import hashlib
import json
from pathlib import Path
from typing import IO, Any


def line_key(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class Journal:
    """Answers in files under `folder`; with None, nothing is saved."""

    def __init__(self, folder: Path | None, rank: int = 0) -> None:
        self._folder, self._rank = folder, rank
        self._file: IO[str] | None = None

    def read(self) -> dict[str, Any]:
        """Return the answers of all processes; a line truncated by a kill is skipped."""
        answers: dict[str, Any] = {}
        for path in sorted(self._folder.glob("process-*.jsonl")) if self._folder else ():
            # splitlines also splits at U+2028 and the like, which json.dumps escapes.
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                    answers[entry["key"]] = entry["value"]
                except (ValueError, KeyError, TypeError):
                    continue
        return answers

    def add(self, key: str, value: Any) -> None:
        if self._folder is None:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"process-{self._rank}.jsonl"
            is_cut = path.is_file() and not path.read_bytes().endswith(b"\n")
            self._file = path.open("a", encoding="utf-8")
            if is_cut:  # the new line must not be appended to a half one
                self._file.write("\n")
        self._file.write(json.dumps({"key": key, "value": value}) + "\n")
        # Flushed to the kernel, not to disk: enough if the process is killed.
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
