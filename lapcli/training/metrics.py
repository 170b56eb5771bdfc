"""`metrics.jsonl`: one object a line, each step once, whatever happened in between."""

import json
import os
from pathlib import Path
from typing import Any

from lapcli.runtime.errors import LapError
from lapcli.runtime.files import write_text


class MetricsLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> list[dict[str, Any]]:
        """Drops what a killed process wrote beyond `step`, and a last line it did not finish."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        if self.path.exists():
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        return kept

    def append(self, line: dict[str, Any]) -> None:
        """In one write, so that a kill leaves at most one unfinished line, which the next start drops."""
        data = (json.dumps(line) + "\n").encode()
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(handle, data)
            finally:
                os.close(handle)
        except OSError as error:
            raise LapError(
                f"cannot write {self.path} ({error}); make room, then run the same command to go on"
            ) from error
        if written != len(data):
            raise LapError(
                f"cannot write {self.path} (the disk is full); make room, then run the same command to go on"
            )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines; a torn last one is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
